"""What the target finds likeliest at each position that is learnt from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .shards import Example, ShardStore

__all__ = ["add_favourites"]

CHUNK = 256
"""Rows whose logits over the whole vocabulary are held at a time."""


def favourites_of(example: Example, lm_head: torch.Tensor) -> NDArray[np.int32]:
    """[positions], -1 where the token behind is not learnt.

    `lm_head` [vocabulary, hidden]; the last of the example's states is what it reads. Scales and
    soft caps of logits change no favourite.
    """
    count = len(example.features)
    learnt = np.asarray(example.learnt[1 : count + 1])
    behind = np.asarray(example.tokens[1 : count + 1])
    out = np.full(count, -1, dtype=np.int32)
    known = np.flatnonzero(learnt == 2)
    out[known] = behind[known]
    # Where the text ends with the last state, nothing stands behind it.
    asked = np.flatnonzero(learnt == 1)
    for at in range(0, len(asked), CHUNK):
        rows = asked[at : at + CHUNK]
        states = example.features[rows, -lm_head.shape[1] :]
        logits = F.linear(torch.from_numpy(states).view(torch.bfloat16).to(lm_head.dtype), lm_head)
        out[rows] = logits.argmax(-1).numpy().astype(np.int32)
    return out


def add_favourites(
    store: ShardStore, lm_head: torch.Tensor, told: Callable[[int, int], None]
) -> None:
    """Add them to all shards that have none; `told` gets shards done, shards in all."""
    shards = store.shards()
    with torch.no_grad():
        for done, shard in enumerate(shards, 1):
            if not store.has_favourites(shard):
                store.add_favourites(
                    shard, [favourites_of(one, lm_head) for one in store.read(shard)]
                )
            told(done, len(shards))
