"""GGUF checkpoints: config out of the metadata, tensors in the order transformers uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .checkpoint import Checkpoint, token_ids
from .fields import ModelFields
from .gguf_file import GgufFile
from .rope import default_inv_freq

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..text import Tokenizer

__all__ = ["open_gguf"]

ARCHITECTURES = ("llama", "qwen2")
# llama.cpp rotates neighbouring pairs in this architecture, so its converter reorders the rows.
_INTERLEAVED = frozenset({"llama"})

NAMES = {
    "embedding": "token_embd.weight",
    "layers.{i}.attention_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.attention.q": "blk.{i}.attn_q.weight",
    "layers.{i}.attention.k": "blk.{i}.attn_k.weight",
    "layers.{i}.attention.v": "blk.{i}.attn_v.weight",
    "layers.{i}.attention.o": "blk.{i}.attn_output.weight",
    "layers.{i}.attention.q.bias": "blk.{i}.attn_q.bias",
    "layers.{i}.attention.k.bias": "blk.{i}.attn_k.bias",
    "layers.{i}.attention.v.bias": "blk.{i}.attn_v.bias",
    "layers.{i}.attention.o.bias": "blk.{i}.attn_output.bias",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.mlp.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.mlp.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.mlp.gate.bias": "blk.{i}.ffn_gate.bias",
    "layers.{i}.mlp.up.bias": "blk.{i}.ffn_up.bias",
    "layers.{i}.mlp.down.bias": "blk.{i}.ffn_down.bias",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Stored frequencies of old files; the metadata decides them.
_IGNORED = (_ROPE_FACTORS, "blk.{i}.attn_rot_embd", "rope_freqs")

_HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.orig_ctx_len", "rope.scaling.finetuned"})


class _Metadata:
    """One architecture's values; remembers which were asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._values = file.metadata
        self._prefix = f"{architecture}."
        self._seen: set[str] = set()

    def get(self, key: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        self._seen.add(key)
        value = self._values.get(self._prefix + key, default)
        # A value per layer is as good as one value where all layers agree.
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is ...:
            raise LoadError(f"[{self._prefix}{key}] expected a value, got none")
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise LoadError(f"[{self._prefix}{key}] expected a number, got {value!r}")
        return value

    def integer(self, key: str, default: Any = ...) -> int:
        value: int = self.get(key, (int,), default)
        return value

    def number(self, key: str, default: Any = ...) -> float:
        return float(self.get(key, (int, float), default))

    def text(self, key: str, default: str) -> str:
        return str(self.get(key, (str,), default))

    def finish(self) -> None:
        """Refuse by name the values that nobody asked for, unless they say nothing."""
        for key, value in self._values.items():
            short = key.removeprefix(self._prefix)
            if short == key or short in self._seen or short in _HARMLESS:
                continue
            scale_like = any(word in short for word in ("scale", "factor"))
            if not (value in (0, False, "", "none") or (scale_like and value == 1)):
                raise LoadError(f"[{key}] is not supported here, got {value!r}")


def _fields_of(file: GgufFile, name: str) -> ModelFields:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LoadError(
            f"[{name}] unknown GGUF architecture {architecture!r}; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    meta = _Metadata(file, architecture)
    embedding = file.entries.get(NAMES["embedding"])
    vocabulary = len(embedding.shape) and embedding.shape[0] if embedding else None
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if heads < 1:
        raise LoadError(f"[{architecture}.attention.head_count] expected at least 1, got {heads}")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, head_dim) != head_dim:
            raise LoadError(
                f"[{architecture}.{key}] expected {head_dim}, the head size, "
                f"got {meta.integer(key)}"
            )
    scaling = meta.text("rope.scaling.type", "none")
    if scaling != "none":
        raise LoadError(
            f"[{architecture}.rope.scaling.type] expected 'none', got {scaling!r}: "
            "this kind of rope scaling is not supported"
        )
    fields = ModelFields(
        family=architecture,
        vocab_size=meta.integer("vocab_size", vocabulary if vocabulary else ...),
        hidden_size=hidden,
        intermediate_size=meta.integer("feed_forward_length"),
        num_layers=meta.integer("block_count"),
        num_heads=heads,
        num_kv_heads=meta.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=meta.integer("context_length"),
        norm_eps=_shortest(meta.number("attention.layer_norm_rms_epsilon")),
        rope_inv_freq=_inv_freq(file, meta.number("rope.freq_base", 10000.0), head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.entries,
        output_bias="blk.0.attn_output.bias" in file.entries,
        mlp_bias="blk.0.ffn_gate.bias" in file.entries,
        # llama.cpp stores an output matrix only where it is not the embedding.
        tied_embeddings=NAMES["lm_head"] not in file.entries,
    )
    meta.finish()
    fields.check()
    return fields


def _shortest(value: float) -> float:
    """A number stored as fp32, as it was written: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _inv_freq(file: GgufFile, theta: float, head_dim: int) -> tuple[float, ...]:
    """Frequencies, divided by the file's factors where it has any (Llama 3.1's rule)."""
    if not theta > 0:
        raise LoadError(f"[rope.freq_base] expected a positive number, got {theta}")
    frequencies = default_inv_freq(theta, head_dim)
    if _ROPE_FACTORS in file.entries:
        factors = file.read(_ROPE_FACTORS)
        if factors.shape != frequencies.shape or not bool((factors > 0).all()):
            raise LoadError(
                f"[{_ROPE_FACTORS}] expected {len(frequencies)} positive values, "
                f"got shape {list(factors.shape)}"
            )
        frequencies = frequencies / factors
    return tuple(float(value) for value in frequencies)


def open_gguf(name: str, path: Path, dtype: str) -> Checkpoint:
    """Open a .gguf file. Raises LoadError as `open_checkpoint` does."""
    file = GgufFile(path)
    try:
        fields = _fields_of(file, name)
        interleaved = fields.family in _INTERLEAVED
        meta = file.metadata
        eos = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        bos = token_ids(meta.get("tokenizer.ggml.bos_token_id"), fields.vocab_size, "bos_token_id")

        def reorder(canonical: str, array: NDArray[Any]) -> NDArray[Any]:
            return _halves(canonical, array, fields) if interleaved else array

        def tokenizer() -> Tokenizer | None:
            if "tokenizer.ggml.model" not in meta:
                return None
            from ..text.gguf_tokenizer import tokenizer_from_metadata

            return tokenizer_from_metadata(meta)

        return Checkpoint(
            name=name,
            kind="gguf",
            config=fields,
            source=file,
            names=NAMES,
            ignored=_IGNORED,
            dtype=dtype,
            eos_token_ids=token_ids(
                [one for one in eos if one is not None], fields.vocab_size, "eos_token_id"
            ),
            bos_token_id=bos[0] if bos else None,
            tokenizer=tokenizer,
            reorder=reorder,
        )
    except Exception:
        file.close()
        raise


def _halves(canonical: str, array: NDArray[Any], fields: ModelFields) -> NDArray[Any]:
    """Put q and k rows (x0 y0 x1 y1 ...) back in the order x0 x1 ... y0 y1 ... in each head."""
    part = canonical.removesuffix(".bias").rpartition(".")[2]
    heads = {"q": fields.num_heads, "k": fields.num_kv_heads}.get(part)
    if heads is None or ".attention." not in canonical:
        return array
    pairs = array.reshape(heads, fields.head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
