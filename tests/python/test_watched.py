"""A drafter that is watched works as the one inside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import greedy

from specrt import Drafter, DraftTree, Engine, SamplingParams, _core
from specrt.drafters import Suffix

SMALL: dict[str, Any] = {"max_batch_size": 2, "max_model_len": 256, "threads": 1}


def watch(engine: Engine, inner: _core.CoreDrafter) -> list[tuple[list[int], DraftTree]]:
    """Gives the engine that drafter; every draft that it makes from now on."""
    seen: list[tuple[list[int], DraftTree]] = []
    assert engine._drafter is not None
    engine._drafter._shared = _core.make_watched_drafter(
        inner, lambda tokens, tree: seen.append((list(tokens), tree))
    )
    return seen


def test_it_is_told_what_has_finished(make_bigram: Callable[..., Path]) -> None:
    """A suffix cache learns from finished requests."""
    path = make_bigram(np.random.default_rng(0).normal(size=(256, 256)))
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)
    with Engine(path, Suffix(), enable_prefix_caching=False, **SMALL) as engine:
        assert engine._drafter is not None
        seen = watch(engine, engine._drafter.for_request())
        first, again = (engine.generate([1, 2, 3], params) for _ in range(2))
    assert again.token_ids == first.token_ids
    # Little repeats in the text itself; all of it is known the second time.
    assert again.metrics.accepted_tokens > first.metrics.accepted_tokens + 15
    assert seen


class Half(Drafter):
    """Right every other time."""

    def __init__(self, step_cost: float) -> None:
        self.step_cost = step_cost

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        right = tokens[-1] % 3 == 0
        return DraftTree.chain([(tokens[-1] + (1 if right else 2)) % 256]) if budget else None


def test_it_costs_what_the_drafter_costs(counter: Path) -> None:
    """The brake goes by that."""
    drafted = []
    for cost, watched in ((0.8, False), (0.8, True), (0.0, True)):
        half = Half(cost)
        with Engine(counter, half, num_speculative_tokens=1, **SMALL) as engine:
            seen = watch(engine, _core.make_python_drafter(half)) if watched else []
            drafted.append(engine.generate([0], greedy(200)).metrics.drafted_tokens)
            assert bool(seen) == watched
    assert drafted[0] == drafted[1] < drafted[2]


def test_there_has_to_be_one() -> None:
    with pytest.raises(TypeError):
        _core.make_watched_drafter(None, print)  # type: ignore[arg-type]
