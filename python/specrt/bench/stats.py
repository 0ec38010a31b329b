"""Few numbers that stand for many."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..engine_metrics import percentiles

__all__ = ["Chosen", "Interval", "Spread", "beside_best", "mean_interval"]


@dataclass(frozen=True)
class Spread:
    """A median between its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of no values, zeros."""
        low, median, high = percentiles(values, (25, 50, 75))
        return cls(median, low, high)

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval, `mean` ± `margin`."""

    mean: float
    margin: float
    """NaN of fewer than two values."""

    @property
    def low(self) -> float:
        return self.mean - self.margin

    @property
    def high(self) -> float:
        return self.mean + self.margin

    def as_json(self) -> dict[str, float | None]:
        margin = None if math.isnan(self.margin) else self.margin
        return {"mean": self.mean, "margin": margin}

    def __str__(self) -> str:
        if math.isnan(self.margin):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ± {self.margin:.3f}"


# Student's t at 97.5 %, by degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's, of values that have nothing to do with each other."""
    if not values:
        return Interval(0.0, math.nan)
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan)
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.960 + 2.45 / freedom
    return Interval(mean, t * statistics.stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True)
class Chosen:
    """One contender beside the best of others, which other repetitions chose."""

    ratio: Interval
    """Of what it reached by what the chosen one reached in the same repetition."""
    best: tuple[str, str]
    """Chosen by the even repetitions, and by the odd ones."""


def beside_best(one: Sequence[float], others: Mapping[str, Sequence[float]]) -> Chosen | None:
    """Values by repetition, the larger the better. None of fewer than two repetitions.

    To choose the best by the numbers that it is then compared with would favour it: the best of
    several noisy means is the luckiest too. So even repetitions choose (by mean) what odd ones
    compare with, and the other way round.
    """
    if len(one) < 2 or not others:
        return None

    def choose(parity: int) -> str:
        return max(others, key=lambda name: statistics.fmean(others[name][parity::2]))

    by_even, by_odd = choose(0), choose(1)
    ratios = [
        value / others[by_odd if place % 2 == 0 else by_even][place]
        for place, value in enumerate(one)
    ]
    return Chosen(mean_interval(ratios), (by_even, by_odd))
