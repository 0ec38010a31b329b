"""Matrices as a checkpoint's own integers, for a core that stores the same kind of integers.

What a format calls groups, zero points and scales is brought into the core's terms without
rounding, or refused with a reason; the caller then reads values and lets the core round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    CodePrecision = Literal["int8", "int4"]

__all__ = ["GROUP", "Codes", "Grouped", "Misfit", "fits_half", "stack"]

GROUP = 32
"""Inputs that share a scale and a minimum in the core's int4."""


class Misfit(Exception):
    """Why integers cannot be kept as they are."""


@dataclass(frozen=True)
class Codes:
    """A matrix [rows, columns] as the core's `set_quantised` takes it.

    int8: scale * code, one scale a row, codes from -128. int4: for each `GROUP` columns
    scale * code + minimum, or scale * (code + minimum) with `zero_points`; codes from 0 to 15,
    scales and minima [rows, groups] that fp16 can hold.
    """

    precision: CodePrecision
    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None = None
    zero_points: bool = False

    def reordered(self, reorder: Callable[[NDArray[Any]], NDArray[Any]]) -> Codes:
        """With its rows in another order: `reorder` does that to any array of as many rows."""
        return Codes(
            self.precision,
            reorder(self.codes),
            reorder(self.scales),
            None if self.minima is None else reorder(self.minima),
            self.zero_points,
        )


def stack(parts: Sequence[Codes]) -> Codes:
    """The rows of all parts, one behind the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    minima = [one.minima for one in parts if one.minima is not None]
    return Codes(
        first.precision,
        np.concatenate([one.codes for one in parts]),
        np.concatenate([one.scales for one in parts]),
        np.concatenate(minima) if minima else None,
        first.zero_points,
    )


def fits_half(values: NDArray[np.float32]) -> bool:
    """Whether fp16 holds each of these exactly, none of them infinite or NaN."""
    with np.errstate(over="ignore"):
        return bool((np.isfinite(values) & (values.astype(np.float16) == values)).all())


@dataclass(frozen=True)
class Grouped:
    """Weights scale * (value - zero): values [rows, columns], scales and zeros [rows, groups].

    `group` is each column's group. Values are integers, or float8 as float32, which has no codes.
    """

    values: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[Any]
    group: NDArray[Any]

    def floats(self) -> NDArray[np.float32]:
        result = self.values.astype(np.float32)
        result -= self.zeros.astype(np.float32)[:, self.group]
        result *= self.scales[:, self.group]
        return result

    def codes(self, precision: CodePrecision) -> Codes:
        """Raises Misfit where the core's integers cannot say the same."""
        return self._int4() if precision == "int4" else self._int8()

    def _int4(self) -> Codes:
        if self.values.dtype != np.uint8 or self.values.max(initial=0) > 15:
            raise Misfit("its values are not of 4 bits")
        starts = self.group[::GROUP]
        if not np.array_equal(np.repeat(starts, GROUP)[: len(self.group)], self.group):
            raise Misfit(f"not every {GROUP} neighbouring inputs share a scale, as with act-order")
        if not fits_half(self.scales):
            raise Misfit("its scales are beyond fp16")
        return Codes(
            "int4",
            self.values.view(np.int8),
            np.ascontiguousarray(self.scales[:, starts]),
            np.ascontiguousarray(np.float32(0) - self.zeros.astype(np.float32)[:, starts]),
            zero_points=True,
        )

    def _int8(self) -> Codes:
        if self.values.dtype.kind not in "iu":
            raise Misfit("its values are not integers")
        if self.scales.shape[1] != 1:
            raise Misfit("an output has more than one scale")
        codes = self.values
        if codes.dtype != np.int8 or self.zeros.any():
            wide = codes.astype(np.int16) - self.zeros.astype(np.int16)
            if wide.min(initial=0) < -128 or wide.max(initial=0) > 127:
                raise Misfit("its zero points take values beyond int8")
            codes = wide.astype(np.int8)
        return Codes("int8", codes, np.ascontiguousarray(self.scales[:, 0], np.float32))
