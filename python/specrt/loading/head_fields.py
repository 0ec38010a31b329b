"""What a draft head is, in the core's own terms: a decoder's fields and how it reads the target."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import _core
from ..errors import LoadError
from .checkpoint import DType, resolve_dtype
from .fields import ModelFields
from .source import Source, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["HeadCheckpoint", "HeadFields"]


@dataclass(frozen=True)
class HeadFields(ModelFields):
    """A head's fields: those of its layers, and field for field `specrt::HeadConfig`.

    `vocab_size` is the output vocabulary, `head_input_vocab` that of the embedding.
    """

    head_kind: Literal["fused", "beside"] = "fused"
    head_input_vocab: int = 0
    head_feature_parts: int = 1
    head_feature_size: int = 0
    head_fc: bool = True
    head_fc_bias: bool = False
    head_hidden_first: bool = False
    head_embedding_norm: bool = False
    head_hidden_norm: bool = False
    head_zero_first: bool = False
    head_first_norm: bool = True
    head_input_norm: bool = False
    head_part_norms: bool = False
    head_norm_before_residual: bool = False
    head_final_norm: bool = True
    head_norm_output: bool = False
    head_own_embedding: bool = True
    head_own_lm_head: bool = True


class HeadCheckpoint:
    """A draft head that has been opened and checked, no weight read yet. A context manager."""

    def __init__(
        self,
        *,
        name: str,
        fields: HeadFields,
        source: Source,
        names: Mapping[str, str],
        feature_layers: tuple[int, ...],
        feature_normed: bool,
        target_of_draft: tuple[int, ...] = (),
        dtype: str,
        transform: Callable[[str, NDArray[Any]], NDArray[Any]] | None = None,
        owns_source: bool = True,
        later: tuple[HeadCheckpoint, ...] = (),
    ) -> None:
        """`names` has the stored name of every canonical tensor; `later` are further modules.

        Raises LoadError where a tensor is missing or of another shape.
        """
        self.name, self.fields = name, fields
        self.feature_layers, self.feature_normed = feature_layers, feature_normed
        self.target_of_draft = target_of_draft
        self._source, self._names, self._transform = source, names, transform
        self._others: dict[str, Tensor] = {}
        self._owns_source, self.later = owns_source, later
        self.config = _core.ModelConfig(**vars(fields))
        wanted = dict(_core.tensors_of(self.config))
        missing = sorted(one for one in wanted if names.get(one) not in source.entries)
        if missing:
            stored = ", ".join(names.get(one, one) for one in missing)
            raise LoadError(f"[{name}] expected every tensor of the head, got none for {stored}")
        for canonical, shape in wanted.items():
            entry = source.entries[names[canonical]]
            if entry.shape != tuple(shape):
                raise LoadError(
                    f"[{name}] {names[canonical]}: expected shape {list(shape)}, got "
                    f"{list(entry.shape)}"
                )
            if entry.dtype not in source.loadable:
                raise LoadError(
                    f"[{name}] {names[canonical]}: expected one of "
                    f"{', '.join(sorted(source.loadable))}, got {entry.dtype}"
                )
        self.names: list[str] = sorted(wanted)
        self.dtype: DType = resolve_dtype(
            dtype, {source.entries[names[one]].dtype for one in self.names}
        )

    def tensor(self, canonical: str) -> Tensor:
        """One tensor by its canonical name, as `Checkpoint.tensor` gives it."""
        if canonical in self._others:
            return self._others[canonical]
        array = self._source.read(self._names[canonical])
        if self._transform is not None and array.ndim == 1:
            array = self._transform(canonical, array)
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = np.ascontiguousarray(array).copy()
        return Tensor(canonical, "bfloat16" if array.dtype == np.uint16 else "float32", array)

    def read_as(
        self,
        *,
        fields: Mapping[str, Any] | None = None,
        feature_layers: tuple[int, ...] | None = None,
        feature_normed: bool | None = None,
        target_of_draft: tuple[int, ...] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> HeadCheckpoint:
        """The same files, understood otherwise; shapes stay. Closing one closes both."""
        other = copy.copy(self)
        other.fields = replace(self.fields, **(fields or {}))
        other.fields.check()
        other.config = _core.ModelConfig(**vars(other.fields))
        if feature_layers is not None:
            other.feature_layers = feature_layers
        if feature_normed is not None:
            other.feature_normed = feature_normed
        if target_of_draft is not None:
            other.target_of_draft = target_of_draft
        other._others = {**self._others, **(tensors or {})}
        return other

    def close(self) -> None:
        if self._owns_source:
            self._source.close()
