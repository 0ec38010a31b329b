"""The reduced draft vocabulary: which of the target's tokens a head can say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["choose_vocabulary", "coverage"]


def choose_vocabulary(
    texts: Iterable[NDArray[np.int32]], vocab_size: int, size: int
) -> NDArray[np.int64]:
    """The `size` token ids that occur most often, in order; of equals the lower id.

    Where few tokens occur, lower ids fill up: in a vocabulary made by merges those are the more
    frequent ones. Raises InvalidArgumentError where `size` is not from 1 to `vocab_size`.
    """
    if not 1 <= size <= vocab_size:
        raise InvalidArgumentError(
            f"[draft_vocab_size] expected from 1 to the target's {vocab_size}, got {size}"
        )
    counts = count_tokens(texts, vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size]).astype(np.int64)


def count_tokens(texts: Iterable[NDArray[np.int32]], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab_size)
    return counts


def coverage(texts: Iterable[NDArray[np.int32]], kept: NDArray[np.int64], vocab_size: int) -> float:
    """The share of tokens that are among those kept; 1 for no tokens."""
    counts = count_tokens(texts, vocab_size)
    total = int(counts.sum())
    return float(counts[kept].sum()) / total if total else 1.0
