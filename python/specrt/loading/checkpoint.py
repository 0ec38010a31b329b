"""A checkpoint that has been opened and checked: its config, its tokens, its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import InvalidArgumentError, LoadError
from .fields import ModelFields, tensor_shapes
from .mtp_names import mtp_tensors
from .source import Source, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..text import Tokenizer
    from .codes import Codes

    Transform = Callable[[str, NDArray[Any]], NDArray[Any]]

__all__ = ["Checkpoint", "DType", "Kind", "TokenIds", "check_tie", "resolve_dtype", "token_ids"]

DType = Literal["float32", "bfloat16", "float16", "int8", "int4", "w8a8"]
Kind = Literal["safetensors", "gguf", "torch", "memory"]
TokenIds = tuple[int, ...]

_DTYPES: dict[str, DType] = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "int8": "int8",
    "int4": "int4",
    "w8a8": "w8a8",
}


class Checkpoint:
    """What `open_checkpoint` gives: everything checked, no tensor read yet.

    A context manager; `close()` lets go of the files.
    """

    name: str
    """The path, hub id, or class that the checkpoint was opened from."""
    kind: Kind
    config: ModelFields
    dtype: DType
    """The precision to run in, with "auto" resolved."""
    eos_token_ids: TokenIds
    """Tokens that end a text, () where the checkpoint names none."""
    bos_token_id: int | None
    generation: Mapping[str, Any]
    """generation_config.json as it stands; {} where there is none."""

    def __init__(
        self,
        *,
        name: str,
        kind: Kind,
        config: ModelFields,
        source: Source,
        names: Mapping[str, str],
        ignored: Sequence[str],
        dtype: str,
        eos_token_ids: TokenIds = (),
        bos_token_id: int | None = None,
        generation: Mapping[str, Any] | None = None,
        mtp_modules: int | None = None,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        transform: Transform | None = None,
        reorder: Transform | None = None,
    ) -> None:
        """`names` and `ignored` are templates in which `{i}` is a layer; canonical tensors that
        share a name are its rows, one behind the other. `reorder` puts a tensor's rows in the
        core's order; then `transform` changes the values of vectors.

        Raises LoadError unless the source holds exactly the config's tensors, in its shapes.
        """
        self.name, self.kind, self.config = name, kind, config
        self.eos_token_ids, self.bos_token_id = eos_token_ids, bos_token_id
        self.generation = generation or {}
        self.mtp_modules = mtp_modules
        """How many multi-token prediction modules the config says there are."""
        self._source, self._tokenizer = source, tokenizer
        self._transform, self._reorder = transform, reorder
        self._shapes = tensor_shapes(config)
        self._names = {one: _name_of(one, names) for one in self._shapes}
        self._rows: dict[str, tuple[int, int]] = {}
        ends: dict[str, int] = {}
        for one, shared in self._names.items():
            start = ends.get(shared, 0)
            ends[shared] = start + self._shapes[one][0]
            self._rows[one] = (start, ends[shared])
        self._stored = {
            shared: (ends[shared], *self._shapes[one][1:]) for one, shared in self._names.items()
        }
        useless = _expand(ignored, config.num_layers)
        if config.tied_embeddings:
            useless.add(names["lm_head"])  # `check_tie` has found it equal to the embedding
        self._check(useless)
        self.dtype = resolve_dtype(dtype, {source.entries[n].dtype for n in self._names.values()})

    def _check(self, ignored: set[str]) -> None:
        """Names, dtypes and shapes, from headers alone."""
        entries, wanted = self._source.entries, self._stored
        ignored = ignored | self._source.useless | mtp_tensors(entries, self.config.num_layers)
        missing = [name for name in wanted if name not in entries]
        left = sorted(name for name in entries if name not in wanted and name not in ignored)
        if missing or left:
            parts = [
                f"{what} {_shorten(names)}"
                for what, names in (("missing", missing), ("unexpected", left))
                if names
            ]
            raise LoadError(
                f"[{self.name}] expected exactly the tensors of a {self.config.family} model, "
                f"got {'; '.join(parts)}"
            )
        for name, shape in wanted.items():
            entry = entries[name]
            if entry.shape != shape:
                raise LoadError(
                    f"[{self.name}] {name}: expected shape {list(shape)}, got {list(entry.shape)}"
                )
            if entry.dtype not in self._source.loadable:
                raise LoadError(
                    f"[{self.name}] {name}: expected one of "
                    f"{', '.join(sorted(self._source.loadable))}, got {entry.dtype}"
                )

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order in which a forward pass reads them."""
        return list(self._names)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors in the order of `names`, each read when asked for."""
        return map(self.tensor, self.names)

    def tensor(self, canonical: str) -> Tensor:
        """One tensor by its canonical name.

        fp32 and bf16 come as stored, fp16 and GGUF's quantised tensors as float32, weights that a
        quantization_config describes as the bfloat16 values they stand for. Raises LoadError where
        data cannot be read.
        """
        name, (start, stop) = self._names[canonical], self._rows[canonical]
        if (stop - start, *self._shapes[canonical][1:]) == self._stored[name]:
            array = self._source.read(name)
        else:
            array = self._source.read_rows(name, start, stop)
        if self._reorder is not None:
            array = self._reorder(canonical, array)
        if self._transform is not None and array.ndim == 1:
            array = self._transform(canonical, array)
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = np.ascontiguousarray(array).copy()
        return Tensor(canonical, "bfloat16" if array.dtype == np.uint16 else "float32", array)

    def codes(self, canonical: str, precision: str) -> Codes | None:
        """The same tensor as the integers that it is stored as, for a core that holds it in
        `precision`; None where they do not mean there exactly what `tensor` gives."""
        if precision not in ("int8", "w8a8", "int4"):
            return None
        kind: Literal["int8", "int4"] = "int4" if precision == "int4" else "int8"
        name, (start, stop) = self._names[canonical], self._rows[canonical]
        codes = self._source.read_codes(name, kind, start, stop)
        if codes is None or self._reorder is None:
            return codes
        return codes.reordered(partial(self._reorder, canonical))

    @property
    def source(self) -> Source:
        """Where its tensors are, those of a multi-token prediction module among them."""
        return self._source

    @property
    def transform(self) -> Transform | None:
        """What its vectors need on their way in."""
        return self._transform

    def stored_name(self, canonical: str) -> str:
        """The checkpoint's name of a canonical tensor."""
        return self._names[canonical if canonical in self._names else "embedding"]

    def layer_names(self, layer: int) -> dict[str, str]:
        """Stored names of one layer's tensors by canonical name."""
        prefix = f"layers.{layer}."
        return {one: name for one, name in self._names.items() if one.startswith(prefix)}

    def load_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own tokenizer, None where it has none. Raises LoadError."""
        return self._tokenizer()

    def close(self) -> None:
        """Let go of the files. May be called twice; arrays already handed out stay valid."""
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _name_of(canonical: str, names: Mapping[str, str]) -> str:
    """layers.3.mlp.up -> the checkpoint's own name for it."""
    if not canonical.startswith("layers."):
        return names[canonical]
    _, layer, rest = canonical.split(".", 2)
    return names[f"layers.{{i}}.{rest}"].replace("{i}", layer)


def _expand(templates: Sequence[str], num_layers: int) -> set[str]:
    return {one.replace("{i}", str(i)) for one in templates for i in range(num_layers)}


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def resolve_dtype(asked: str, stored: set[str]) -> DType:
    """The precision to run in; `stored` are the dtypes of the weights.

    "auto" is float32 where every weight is stored so, else bfloat16, also for quantised ones.
    Whether the device takes it, the core says. Raises InvalidArgumentError for what is none.
    """
    lowered = asked.lower().removeprefix("torch.") if isinstance(asked, str) else repr(asked)
    if lowered == "auto":
        return "float32" if stored == {"float32"} else "bfloat16"
    if lowered in _DTYPES:
        return _DTYPES[lowered]
    raise InvalidArgumentError(
        "[dtype] expected 'auto', 'float32', 'bfloat16', 'float16', 'int8', 'int4' or 'w8a8', got "
        f"{asked!r}"
    )


def check_tie(fields: ModelFields, source: Source, names: Mapping[str, str], label: str) -> None:
    """Refuse a checkpoint that says its embeddings are tied but stores two different tables.

    The rule for tie_word_embeddings and a stored lm_head: true + absent is tied; true + present
    and equal, byte for byte, is tied; true + present and different is refused, since versions of
    transformers disagree on which table counts; false + present is untied; false + absent is
    refused as a missing tensor.
    """
    embedding, lm_head = names["embedding"], names["lm_head"]
    if not fields.tied_embeddings or not {embedding, lm_head} <= set(source.entries):
        return
    one, other = source.entries[embedding], source.entries[lm_head]
    if one == other:
        # Compared as bits, so that NaNs and signed zeros take part.
        bits = np.uint16 if one.dtype == "bfloat16" else np.uint32
        if np.array_equal(source.read(embedding).view(bits), source.read(lm_head).view(bits)):
            return
    raise LoadError(
        f"[{label}] tie_word_embeddings is true, but {lm_head} is stored and differs from "
        f"{embedding}: set tie_word_embeddings to false to use {lm_head}, or remove the tensor"
    )


def token_ids(value: Any, vocab_size: int, where: str) -> TokenIds:
    """Token ids out of a config: null, a number or a list. Raises LoadError for other kinds."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    found: list[int] = []
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int):
            raise LoadError(f"[{where}] expected token ids, got {value!r}")
        if not 0 <= one < vocab_size:
            warnings.warn(f"{where}: no token {one} in a vocabulary of {vocab_size}", stacklevel=2)
        elif one not in found:
            found.append(one)
    return tuple(found)
