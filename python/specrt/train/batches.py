"""Texts in an order that a seed gives, packed into batches, from any point of it onwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .shards import Example

__all__ = ["Batches", "Position", "Rows", "rows_of"]


@dataclass(frozen=True)
class Position:
    """Where in the data a run is: so many batches of an epoch have been seen."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Rows:
    """Which rows of a text are learnt from.

    A row is a position of which the target's hidden state and the token behind are known. It says
    what comes behind that token, where the target's own opinion is known too.
    """

    context: int
    """Rows 0 to context - 1 can be attended to."""
    rows: NDArray[np.int64]
    """Those that are learnt from, rising."""


def rows_of(example: Example, ahead: int = 2) -> Rows:
    """Rows p whose tokens p + 1 and p + `ahead` are to be learnt.

    The teacher of what stands at p + ahead is the state at p + ahead - 1, so that has to be there.
    """
    learnt = np.asarray(example.learnt, dtype=bool)
    known = min(len(example.features), len(learnt) - 1)
    last = min(known - ahead + 1, len(learnt) - ahead)
    if last <= 0:
        return Rows(0, np.zeros(0, dtype=np.int64))
    kept = learnt[1 : 1 + last] & learnt[ahead : ahead + last]
    return Rows(last, np.flatnonzero(kept))


class Batches:
    """Batches of texts of about `rows` learnt rows together, epoch after epoch."""

    def __init__(self, sizes: Sequence[int], rows: int, seed: int) -> None:
        """`sizes` are the learnt rows of each text; those without any are left out."""
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._kept = np.flatnonzero(self._sizes > 0)
        if len(self._kept) == 0:
            raise LoadError("[data] expected texts with something to learn, got none")
        self._rows, self._seed = rows, seed
        self._epoch: tuple[int, list[list[int]]] | None = None

    @property
    def rows_an_epoch(self) -> int:
        return int(self._sizes.sum())

    def of_epoch(self, epoch: int) -> list[list[int]]:
        """Indices of the texts of each batch."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._kept)
            batches: list[list[int]] = [[]]
            count = 0
            for one in order.tolist():
                if count >= self._rows:
                    batches.append([])
                    count = 0
                batches[-1].append(one)
                count += int(self._sizes[one])
            self._epoch = (epoch, batches)
        return self._epoch[1]

    def at(self, position: Position) -> tuple[list[int], Position]:
        """The batch at a position, and the position behind it."""
        batches = self.of_epoch(position.epoch)
        batch = batches[position.batch]
        if position.batch + 1 < len(batches):
            return batch, Position(position.epoch, position.batch + 1)
        return batch, Position(position.epoch + 1, 0)
