"""Where tensors come from: the one interface behind which every file format stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .codes import CodePrecision, Codes

__all__ = ["Entry", "Source", "Tensor", "as_float32"]


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """What `Source.read` gave, as float32 whichever kind it is."""
    if array.dtype == np.uint16:
        widened: NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
        return widened
    return array.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Tensor:
    """One tensor under its canonical name.

    `array` is row-major and must not be written to. Its dtype is float32, or uint16 holding the
    raw bits where `dtype` is "bfloat16".
    """

    name: str
    dtype: Literal["float32", "bfloat16"]
    array: NDArray[Any]


@dataclass(frozen=True)
class Entry:
    """What a header tells about a tensor.

    `dtype` is "float32", "bfloat16", "float16", or the name of a quantised type; `shape` is in
    elements, outermost dimension first.
    """

    dtype: str
    shape: tuple[int, ...]


class Source(ABC):
    """A set of named tensors of which headers are known and data is read on demand."""

    entries: dict[str, Entry]
    loadable: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    """The dtypes that `read` can turn into float32 or raw bfloat16."""
    useless: frozenset[str] = frozenset()
    """Names of tensors that change nothing, whether a model asks for them or not."""

    @abstractmethod
    def read(self, name: str) -> NDArray[Any]:
        """The tensor as float32, or as uint16 where it is bfloat16; integers and float8, which
        are not `loadable`, as they are stored. Raises LoadError."""

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of what `read` gives."""
        return self.read(name)[start:stop]

    def read_codes(
        self, name: str, precision: CodePrecision, start: int, stop: int
    ) -> Codes | None:
        """Rows [start, stop) as the integers that they are stored as, None where the core's
        integers of this precision do not mean exactly what `read_rows` gives."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of files. Arrays already handed out stay valid."""
