"""EAGLE heads: EAGLE-1 and 2 (the same weights) and EAGLE-3, in the layouts that they come in.

Which of them a folder holds, its tensors say. Embedding and output head that are not among them
are the target's.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import InvalidArgumentError, LoadError
from .family import decoder, layer_windows
from .fields import ModelFields
from .head_fields import HeadCheckpoint, HeadFields
from .hf_config import HfConfig, read_json
from .source import Source

__all__ = ["AuxConvention", "TargetShape", "is_eagle", "is_eagle3", "open_eagle"]

AuxConvention = Literal["input", "output"]


@dataclass(frozen=True)
class TargetShape:
    """What a head has to fit."""

    vocab_size: int
    hidden_size: int
    num_layers: int


# Stored tensors by what the head calls them, behind any "model." and with "midlayer" for layer 0.
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q.bias": "self_attn.q_proj.bias",
    "attention.k.bias": "self_attn.k_proj.bias",
    "attention.v.bias": "self_attn.v_proj.bias",
    "attention.o.bias": "self_attn.o_proj.bias",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate.bias": "mlp.gate_proj.bias",
    "mlp.up.bias": "mlp.up_proj.bias",
    "mlp.down.bias": "mlp.down_proj.bias",
}
_WHOLE = {
    "embedding": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc.bias": "fc.bias",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "input_norm": "input_norm.weight",
    "norm": "norm.weight",
    "lm_head": "lm_head.weight",
}
_MAP_NAMES = {"draft_id_to_target_id": "d2t", "target_id_to_draft_id": "t2d"}
_USELESS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def is_eagle(folder: Path) -> bool:
    """Whether a local folder holds an EAGLE head, by its config or else its tensors."""
    if not (folder / "config.json").is_file():
        return False
    raw = read_json(folder / "config.json")
    if "speculators_model_type" in raw:
        return str(raw["speculators_model_type"]).startswith("eagle")
    if "eagle_config" in raw or "eagle" in str(raw.get("architectures")).lower():
        return True
    # EAGLE's own configs look like a model of one layer.
    if raw.get("num_hidden_layers") != 1:
        return False
    source = _open_source(folder)
    if source is None:
        return False
    try:
        return "fc.weight" in _plain_names(source, folder.name)
    finally:
        source.close()


def is_eagle3(folder: Path) -> bool:
    """Which of the two an EAGLE head is: by its tensors, or its config where they are not there."""
    source = _open_source(folder)
    if source is None:
        raw = read_json(folder / "config.json")
        return "eagle3" in str(raw.get("architectures")).lower() or "draft_vocab_size" in raw
    try:
        return "layers.0.hidden_norm.weight" in _plain_names(source, folder.name)
    finally:
        source.close()


def _open_source(folder: Path) -> Source | None:
    from .safetensors_files import SafetensorsSource, shards_of
    from .torch_state import read_pickles

    reader: Any
    for file, reader in (
        ("model.safetensors", SafetensorsSource),
        ("pytorch_model.bin", read_pickles),
    ):
        if (folder / f"{file}.index.json").is_file():
            shards = shards_of(folder, f"{file}.index.json")
            source: Source = reader([folder / one for one in sorted(set(shards.values()))], shards)
            break
        if (folder / file).is_file():
            source = reader([folder / file])
            break
    else:
        return None
    return source


def _plain_names(source: Source, where: str) -> dict[str, str]:
    """Plain name -> stored name. Raises LoadError where two are the same."""
    plain: dict[str, str] = {}
    for name in source.entries:
        one = name.removeprefix("model.")
        if one.startswith("midlayer."):
            one = "layers.0." + one.removeprefix("midlayer.")
        one = _MAP_NAMES.get(one, one)
        if _USELESS.fullmatch(one):
            continue
        if one in plain:
            raise LoadError(f"[{where}] expected one tensor {one}, got {plain[one]} and {name}")
        plain[one] = name
    return plain


def open_eagle(
    model: str | os.PathLike[str],
    target: TargetShape,
    *,
    kind: Literal["eagle", "eagle3"],
    dtype: str = "auto",
    aux_layer_ids: Sequence[int] | None = None,
    aux_convention: AuxConvention = "input",
    max_model_len: int | None = None,
    absolute_ids: bool = False,
) -> HeadCheckpoint:
    """Open and check a head of a folder or hub id; no weight is read yet, d2t apart.

    `absolute_ids` reads d2t as target ids, not as offsets to them.

    Raises LoadError where it is not exactly a head of that kind for this target, and
    InvalidArgumentError for a wrong argument.
    """
    from .open import find_folder

    folder = find_folder(model)
    name = os.fspath(model)
    if not (folder / "config.json").is_file():
        raise LoadError(f"[{name}] expected a config.json in the folder, got none")
    source = _open_source(folder)
    if source is None:
        raise LoadError(
            f"[{name}] expected model.safetensors, pytorch_model.bin, or the index of either, "
            "got none"
        )
    try:
        plain = _plain_names(source, name)
        found = "eagle3" if "layers.0.hidden_norm.weight" in plain else "eagle"
        if found != kind:
            other = {"eagle": "Eagle", "eagle3": "Eagle3"}
            raise LoadError(
                f"[{name}] expected a head for specrt.drafters.{other[kind]}, got tensors of "
                f"{'EAGLE-3' if found == 'eagle3' else 'EAGLE-1 or 2'}: use "
                f"specrt.drafters.{other[found]}"
            )
        reader = _Reader(name, read_json(folder / "config.json"), source, plain, target)
        reader.absolute_ids = absolute_ids
        if kind == "eagle":
            return reader.eagle(dtype, max_model_len)
        return reader.eagle3(dtype, max_model_len, aux_layer_ids, aux_convention)
    except BaseException:
        source.close()
        raise


class _Reader:
    """One head: config, tensors, and what is made of both."""

    def __init__(
        self,
        name: str,
        raw: Mapping[str, Any],
        source: Source,
        plain: dict[str, str],
        target: TargetShape,
    ) -> None:
        self.name, self.source, self.plain, self.target = name, source, plain, target
        self.raw = raw
        self.absolute_ids = False

    def has(self, plain: str) -> bool:
        return plain in self.plain

    def shape(self, plain: str) -> tuple[int, ...]:
        return self.source.entries[self.plain[plain]].shape

    def rows(self, plain: str) -> int:
        shape = self.shape(plain)
        if len(shape) != 2 or shape[0] < 1:
            raise LoadError(
                f"[{self.name}] {self.plain[plain]}: expected a matrix, got shape {list(shape)}"
            )
        return shape[0]

    def layers(self, hf: HfConfig) -> ModelFields:
        """The fields of the head's layers; biases and q/k norms as the tensors have them."""
        hf.only("pretraining_tp", 1)
        hf.only("parallel_drafting", False)
        hf.only("is_causal", True)
        hf.unused("tie_word_embeddings", "max_window_layers")
        if hf.raw.get("quantization_config"):
            raise LoadError(
                f"[{hf.where} quantization_config] expected an unquantised head, got "
                f"{hf.raw['quantization_config']!r}"
            )
        hf.unused("quantization_config")
        fields = decoder(hf, "draft head", positions=2048)
        biases: dict[str, Any] = {}
        for field, key, tensor in (
            ("qkv_bias", "attention_bias", "self_attn.q_proj.bias"),
            ("output_bias", "attention_bias", "self_attn.o_proj.bias"),
            ("mlp_bias", "mlp_bias", "mlp.gate_proj.bias"),
        ):
            biases[field] = self.has(f"layers.0.{tensor}")
            # A config that says so has to have them; one that denies them finds them left over.
            if hf.flag(key, biases[field]) != biases[field] and field != "output_bias":
                raise LoadError(
                    f"[{hf.where} {key}] expected what the tensors say, "
                    f"{biases[field]}, got {not biases[field]}"
                )
        if hf.flag("qkv_bias", biases["qkv_bias"]) != biases["qkv_bias"]:
            raise LoadError(f"[{hf.where} qkv_bias] expected {biases['qkv_bias']}, as the tensors")
        window = hf.window("sliding_window", None)
        sliding = hf.raw.get("model_type") == "mistral" and window is not None
        if hf.flag("use_sliding_window", False) and hf.raw.get("layer_types") is None:
            raise LoadError(
                f"[{hf.where} layer_types] expected a kind for each layer beside "
                "use_sliding_window, got none"
            )
        kind = "sliding_attention" if sliding else "full_attention"
        windows = layer_windows(hf, fields.num_layers, window, [kind] * fields.num_layers)
        head_norms = self.has("layers.0.self_attn.q_norm.weight")
        return replace(
            fields, windows=windows, qk_norm="head" if head_norms else "none",
            logits_scale=hf.positive("logit_scale", 1.0), **biases,
        )  # fmt: skip

    def vocabularies(self, said: int) -> dict[str, Any]:
        """The embedding's side: the head's own or the target's."""
        own = self.has("embed_tokens.weight")
        rows = self.rows("embed_tokens.weight") if own else self.target.vocab_size
        if own and rows != said:
            raise LoadError(
                f"[{self.name}] embed_tokens.weight: expected vocab_size = {said} rows, got {rows}"
            )
        if said > self.target.vocab_size:
            raise LoadError(
                f"[{self.name} vocab_size] expected at most the target's "
                f"{self.target.vocab_size}, got {said}: a head of another vocabulary"
            )
        return {"head_own_embedding": own, "head_input_vocab": rows}

    def checkpoint(
        self,
        fields: HeadFields,
        *,
        layers: tuple[int, ...],
        normed: bool,
        dtype: str,
        target_of_draft: tuple[int, ...] = (),
    ) -> HeadCheckpoint:
        fields.check()
        names = {one: self.plain[plain] for one, plain in _WHOLE.items() if plain in self.plain}
        for layer in range(fields.num_layers):
            for one, plain in _LAYER.items():
                stored = self.plain.get(f"layers.{layer}.{plain}")
                if stored is not None:
                    names[f"layers.{layer}.{one}"] = stored
        for part in range(fields.head_feature_parts):
            stored = self.plain.get(f"fc_norm.{part}.weight")
            if stored is not None:
                names[f"part_norms.{part}"] = stored
        opened = HeadCheckpoint(
            name=self.name, fields=fields, source=self.source, names=names, feature_layers=layers,
            feature_normed=normed, target_of_draft=target_of_draft, dtype=dtype,
        )  # fmt: skip
        used = {names[one] for one in opened.names}
        used |= {self.plain[one] for one in ("d2t", "t2d") if one in self.plain}
        left = sorted(set(self.plain.values()) - used)
        if left:
            shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise LoadError(
                f"[{self.name}] expected exactly a draft head's tensors, got unexpected {shown}"
            )
        return opened

    def fit(self, hidden: int, what: str) -> None:
        if hidden != self.target.hidden_size:
            raise LoadError(
                f"[{self.name} {what}] expected the target's hidden_size = "
                f"{self.target.hidden_size}, got {hidden}"
            )

    def eagle(self, dtype: str, max_model_len: int | None) -> HeadCheckpoint:
        """EAGLE-1 and 2: fc over cat[embedding, hidden], layers, the target's output head."""
        if "speculators_model_type" in self.raw:
            raise LoadError(
                f"[{self.name} speculators_model_type] expected an EAGLE-3 head in speculators' "
                f"format, got {self.raw['speculators_model_type']!r}"
            )
        hf = HfConfig(self.raw, f"{self.name} config.json", max_model_len)
        fields = self.layers(hf)
        # "bias" is fc's; a config that does not say leaves it to the tensors.
        bias = hf.flag("bias", self.has("fc.bias"))
        hf.finish()
        self.fit(fields.hidden_size, "hidden_size")
        own_head = self.has("lm_head.weight")
        if own_head and self.rows("lm_head.weight") != fields.vocab_size:
            raise LoadError(
                f"[{self.name}] lm_head.weight: expected vocab_size = {fields.vocab_size} rows, "
                f"got {self.rows('lm_head.weight')}"
            )
        head = HeadFields(
            **{
                **vars(fields),
                "vocab_size": fields.vocab_size if own_head else self.target.vocab_size,
                "tied_embeddings": False,
            },
            head_kind="fused",
            head_feature_size=fields.hidden_size,
            head_fc_bias=bias,
            # Layer 0 reads fc's output as it is, and the output head that of the last layer.
            head_first_norm=self.has("layers.0.input_layernorm.weight"),
            head_final_norm=self.has("norm.weight"),
            head_own_lm_head=own_head,
            **self.vocabularies(fields.vocab_size),
        )
        return self.checkpoint(head, layers=(), normed=True, dtype=dtype)

    def eagle3(
        self,
        dtype: str,
        max_model_len: int | None,
        aux_layer_ids: Sequence[int] | None,
        convention: AuxConvention,
    ) -> HeadCheckpoint:
        """EAGLE-3: several hidden states of the target, and attention beside the embedding."""
        raw, where = dict(self.raw), f"{self.name} config.json"
        speculators = "speculators_model_type" in raw
        if speculators:
            outer = HfConfig(raw, where)
            outer.only("speculators_model_type", "eagle3")
            method = outer.mapping("speculators_config")
            if method.get("algorithm", "eagle3") != "eagle3":
                raise LoadError(
                    f"[{where} speculators_config algorithm] expected 'eagle3', got "
                    f"{method['algorithm']!r}"
                )
            inner = outer.mapping("transformer_layer_config")
            outer.unused("tie_word_embeddings", "embed_requires_grad")
            hf = HfConfig(inner, f"{where} transformer_layer_config", max_model_len)
        else:
            hf = outer = HfConfig(raw, where, max_model_len)
        fields = self.layers(hf)
        nested = HfConfig(outer.mapping("eagle_config"), f"{where} eagle_config")

        def flag(key: str, default: bool) -> bool:
            return outer.flag(key, nested.flag(key, default))

        use_aux = nested.flag("use_aux_hidden_state", True)
        flags: dict[str, Any] = {
            "head_norm_before_residual": flag("norm_before_residual", speculators),
            "head_norm_output": flag("norm_output", False),
            "head_input_norm": flag("norm_before_fc", False),
            "head_part_norms": flag("fc_norm", False),
        }
        layers = self.aux_layers(outer, nested, aux_layer_ids, convention) if use_aux else ()
        target_hidden = outer.integer("target_hidden_size", self.target.hidden_size)
        own_head = self.has("lm_head.weight")
        rows = self.rows("lm_head.weight") if own_head else self.target.vocab_size
        draft_vocab = outer.integer("draft_vocab_size", rows)
        if not own_head and draft_vocab == fields.vocab_size:
            draft_vocab = rows  # the target's output head, which may be padded
        if draft_vocab != rows:
            raise LoadError(
                f"[{where} draft_vocab_size] expected the {rows} rows of "
                f"{'lm_head.weight' if own_head else 'the target output head'}, got {draft_vocab}"
            )
        for config in (nested, hf, outer):
            config.finish()
        self.fit(target_hidden, "target_hidden_size")
        parts = len(layers) if use_aux else 1
        fc = self.has("fc.weight")
        if use_aux and fc and self.shape("fc.weight")[1:] != (parts * target_hidden,):
            raise LoadError(
                f"[{self.name}] fc.weight: expected inputs for {parts} hidden states of "
                f"{target_hidden} (layers {list(layers)}), got {list(self.shape('fc.weight'))}"
            )
        head = HeadFields(
            **{**vars(fields), "vocab_size": draft_vocab, "tied_embeddings": False},
            head_kind="beside",
            head_feature_parts=parts,
            head_feature_size=target_hidden,
            head_fc=use_aux,
            head_fc_bias=self.has("fc.bias"),
            head_own_lm_head=own_head,
            **self.vocabularies(fields.vocab_size),
            **flags,
        )
        return self.checkpoint(
            head,
            layers=layers,
            normed=not use_aux,
            dtype=dtype,
            target_of_draft=self.id_map(draft_vocab, fields.vocab_size if own_head else rows),
        )

    def aux_layers(
        self,
        outer: HfConfig,
        nested: HfConfig,
        given: Sequence[int] | None,
        convention: AuxConvention,
    ) -> tuple[int, ...]:
        """The layers whose input is read, out of the argument, the config, or EAGLE-3's default."""
        count = self.target.num_layers
        key = "eagle_aux_hidden_state_layer_ids"
        outer.unused(key)
        nested.unused(key)
        said = [one.raw[key] for one in (outer, nested) if one.raw.get(key) is not None]
        if len(said) == 2 and said[0] != said[1]:
            raise LoadError(
                f"[{self.name} {key}] expected the same layers in eagle_config, got {said[0]!r} "
                f"and {said[1]!r}"
            )
        named = given if given is not None else said[0] if said else None
        if named is None:  # what `specrt train` writes beside the default, which others go by
            named = outer.raw.get("specrt_aux_layer_ids")
        if named is None:
            layers = [2, count // 2, count - 3]
            if not all(0 <= one <= count for one in layers):
                raise LoadError(
                    f"[{self.name} {key}] expected the ids of the layers that the head reads, got "
                    f"none: a target of {count} layers is too small for the default"
                )
            warnings.warn(
                f"{self.name} does not name the target's layers that it reads: the input of layers "
                f"{layers} is taken (aux_layer_ids= sets others)",
                stacklevel=4,
            )
            return tuple(layers)
        if not isinstance(named, (list, tuple)) or not all(
            isinstance(one, int) and not isinstance(one, bool) for one in named
        ):
            raise LoadError(f"[{self.name} {key}] expected a list of layer ids, got {named!r}")
        layers = [one + (1 if convention == "output" else 0) for one in named]
        if not layers or not all(0 <= one <= count for one in layers):
            error = LoadError if given is None else InvalidArgumentError
            raise error(
                f"[{self.name} {key}] expected layers of the target, 0 to "
                f"{count - (convention == 'output')}, got {list(named)}"
            )
        return tuple(layers)

    def integers(self, plain: str, *dtypes: str) -> np.ndarray[Any, Any]:
        dtype = self.source.entries[self.plain[plain]].dtype
        if dtype not in dtypes:
            raise LoadError(f"[{self.name}] {plain}: expected {' or '.join(dtypes)}, got {dtype}")
        return np.asarray(self.source.read(self.plain[plain]))

    def id_map(self, draft_vocab: int, vocab: int) -> tuple[int, ...]:
        """Target ids of the draft vocabulary: d + d2t[d]. () where they are the same."""
        if not self.has("d2t"):
            if self.has("t2d") or draft_vocab != vocab:
                raise LoadError(
                    f"[{self.name}] expected a tensor d2t for a draft vocabulary of {draft_vocab} "
                    f"in {vocab} tokens, got none"
                )
            return ()
        offsets = self.integers("d2t", "int64", "int32")
        if offsets.shape != (draft_vocab,):
            raise LoadError(
                f"[{self.name}] d2t: expected shape [{draft_vocab}], got {list(offsets.shape)}"
            )
        first = 0 if self.absolute_ids else np.arange(draft_vocab, dtype=np.int64)
        ids = first + offsets.astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.target.vocab_size or np.any(np.diff(ids) <= 0):
            wanted = (
                "ids that rise and stay"
                if self.absolute_ids
                else ("offsets, so that d + d2t[d] rises and stays")
            )
            hint = "" if self.absolute_ids else " (absolute ids?)"
            raise LoadError(
                f"[{self.name}] d2t: expected {wanted} below {self.target.vocab_size}, got "
                f"others{hint}"
            )
        if self.has("t2d"):
            mask = self.integers("t2d", "bool", "int64", "int32", "int8") != 0
            if mask.shape not in ((vocab,), (self.target.vocab_size,)):
                raise LoadError(
                    f"[{self.name}] t2d: expected shape [{vocab}], got {list(mask.shape)}"
                )
            if not np.array_equal(np.flatnonzero(mask), ids):
                raise LoadError(
                    f"[{self.name}] t2d: expected the tokens that d2t gives, got others"
                )
        if draft_vocab == self.target.vocab_size and np.array_equal(ids, np.arange(draft_vocab)):
            return ()
        return tuple(int(one) for one in ids)
