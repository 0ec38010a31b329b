"""Where tensors come from: the one interface behind which every file format stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Entry", "Source", "Tensor"]


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

    @abstractmethod
    def read(self, name: str) -> NDArray[Any]:
        """The tensor as float32, or as uint16 where it is bfloat16. Raises LoadError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files. Arrays already handed out stay valid."""
