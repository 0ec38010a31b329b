"""What the metrics say, against drafters whose quality is known."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import AlwaysWrong, Branching, Counting, HalfRight, Oracle, assert_identities, greedy
from helpers import known as known_texts

import specrt
from specrt import DraftTree, Engine, Metrics, RequestOutput, SamplingParams
from specrt.drafters import DraftModel, NGram

SMALL: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 8, "threads": 1}


def run(
    model: Path, drafter: Any, gamma: int, count: int, policy: str = "brake", **params: Any
) -> Metrics:
    options = {"num_speculative_tokens": gamma, "policy": policy, **SMALL}
    with Engine(model, drafter, **options) as engine:
        output = engine.generate([0], greedy(count, **params))
    assert_identities(output)
    return output.metrics


def numbers(metrics: Metrics) -> list[float]:
    values = []
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        values += value if isinstance(value, list) else [value]
    return [*values, metrics.tokens_per_second]


def test_nothing_counted_yet() -> None:
    assert set(numbers(Metrics())) == {0}
    assert str(Metrics()) == "no tokens"


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("kind", ["none", "ngram", "python", "model"])
def test_no_nan_where_nothing_was_drafted(counter: Path, kind: str, count: int) -> None:
    drafter: Any = {
        "none": None,
        "ngram": "ngram",
        "python": Counting(),
        "model": DraftModel(model=counter),
    }[kind]
    with Engine(counter, drafter, **SMALL) as engine:
        metrics = engine.generate([5], greedy(count)).metrics
    assert all(math.isfinite(one) and one >= 0 for one in numbers(metrics))
    assert metrics.drafted_tokens == 0
    assert metrics.acceptance_rate == metrics.alpha == 0.0
    assert metrics.acceptance_rate_per_position == metrics.alpha_per_position == []
    assert metrics.completion_tokens == count
    assert metrics.rounds == max(0, count - 1)
    assert str(metrics)


def test_oracle(counter: Path) -> None:
    # 1 token of prefill's, ten whole rounds of six, one round cut to three.
    metrics = run(counter, Counting(), 5, 64)
    assert metrics.rounds == 11
    assert metrics.truncated_rounds == 1
    assert metrics.drafted_tokens == metrics.accepted_tokens == 52
    assert metrics.acceptance_rate == metrics.alpha == 1.0
    assert metrics.acceptance_rate_per_position == [1.0] * 5
    assert metrics.alpha_per_position == [1.0] * 5
    assert metrics.acceptance_length == 6.0


def test_always_wrong(counter: Path) -> None:
    metrics = run(counter, Counting(step=2), 4, 41, policy="fixed")
    assert metrics.rounds == 40
    assert metrics.accepted_tokens == 0
    assert metrics.acceptance_rate == metrics.alpha == 0.0
    assert metrics.acceptance_length == 1.0
    assert metrics.acceptance_rate_per_position == [0.0] * 4
    assert metrics.alpha_per_position == [0.0] * 4
    # The last rounds had room for 3, 2, 1 and no more drafts.
    assert metrics.drafted_tokens == 36 * 4 + 3 + 2 + 1


class EveryOther(Counting):
    """Right, then wrong, by turns of rounds."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.turn = 0
        self.depth = depth

    def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
        self.turn += 1
        chain = [(tokens[-1] + 1 + i) % 256 for i in range(self.depth)]
        if self.turn % 2 == 0:
            chain[1] = 0  # the second token, never what comes next here
        return DraftTree.chain(chain)


def test_half_right(counter: Path) -> None:
    # By turns 3 and 1 of three accepted: rounds of 4 and 2 tokens, 20 of each, all of them whole.
    metrics = run(counter, EveryOther(3), 3, 1 + 20 * 6 + 4)
    full = metrics.rounds - metrics.truncated_rounds
    assert (metrics.rounds, full) == (41, 40)
    assert metrics.drafted_tokens == 123
    assert metrics.accepted_tokens == 83
    assert metrics.acceptance_rate == 83 / 123
    # 80 accepted in whole rounds, 20 first rejections.
    assert metrics.alpha == 80 / 100
    assert metrics.acceptance_length == 120 / 40
    assert metrics.acceptance_rate_per_position == [1.0, 0.5, 0.5]
    assert metrics.alpha_per_position == [1.0, 0.5, 1.0]


def test_alpha_is_the_alpha_of_the_theory(counter: Path) -> None:
    """τ = (1 - α^(γ+1)) / (1 - α) for independent acceptances, here at α = 0.6 and γ = 5."""

    class Coin(specrt.Drafter):
        """Right with probability 0.6 at each depth, from a stream of its own."""

        def __init__(self) -> None:
            self.draw = np.random.default_rng(0)

        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            right = self.draw.random(budget) < 0.6
            return DraftTree.chain(
                [(tokens[-1] + 1 + i + 100 * (not ok)) % 256 for i, ok in enumerate(right)]
            )

    with Engine(counter, Coin(), num_speculative_tokens=5, **SMALL) as engine:
        runs = [engine.generate([0], greedy(500)).metrics for _ in range(8)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    alpha, gamma = 0.6, 5
    tau = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert mean([one.alpha for one in runs]) == pytest.approx(alpha, abs=0.03)
    assert mean([one.acceptance_length for one in runs]) == pytest.approx(tau, abs=0.1)
    rate = mean([one.acceptance_rate for one in runs])
    assert rate == pytest.approx((tau - 1) / gamma, abs=0.03)
    for depth in range(gamma):
        rate = mean([one.acceptance_rate_per_position[depth] for one in runs])
        assert rate == pytest.approx(alpha ** (depth + 1), abs=0.03)
    for depth in range(3):
        rate = mean([one.alpha_per_position[depth] for one in runs])
        assert rate == pytest.approx(alpha, abs=0.06)


def test_rates_agree_with_each_other(l2: Path, l2_close: Path) -> None:
    with Engine(l2, **SMALL) as engine:
        texts = known_texts(engine.generate([[i, i] for i in range(8)], greedy(150)))
    for drafter in (
        Oracle(texts, 264),
        HalfRight(texts, 264),
        HalfRight(texts, 264, period=7),
        AlwaysWrong(texts, 264),
        Branching(texts, 264),
        NGram(prompt_lookup_min=1),
        DraftModel(model=l2_close),
        DraftModel(model=l2),
    ):
        with Engine(l2, drafter, num_speculative_tokens=7, **SMALL) as engine:
            outputs = engine.generate([[i, i] for i in range(8)], greedy(150))
        for output in outputs:
            check_consistency(output)


def check_consistency(output: RequestOutput) -> None:
    assert_identities(output)
    metrics = output.metrics
    assert all(math.isfinite(one) and one >= 0 for one in numbers(metrics))
    full = metrics.rounds - metrics.truncated_rounds
    rates, alphas = metrics.acceptance_rate_per_position, metrics.alpha_per_position
    assert len(rates) == len(alphas) <= 7
    assert all(0 <= one <= 1 for one in [*rates, *alphas])
    assert metrics.acceptance_rate == (
        metrics.accepted_tokens / metrics.drafted_tokens if metrics.drafted_tokens else 0.0
    )
    if full:
        assert 1.0 <= metrics.acceptance_length <= 8.0
        # Whole rounds hold what truncated ones do not.
        in_full = (metrics.acceptance_length - 1) * full
        assert round(in_full, 6) == round(in_full)
        assert in_full <= metrics.accepted_tokens + 1e-9


def test_tree_counts_depths_and_first_rejections(counter: Path) -> None:
    class Tree(specrt.Drafter):
        """Two children, the second right, with one wrong child: one accepted, one rejection."""

        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            last = tokens[-1]
            return DraftTree([last + 7, last + 1, last + 9], [-1, -1, 1])

    # Where a row is dear, on AVX2 say, the brake would leave some of them out.
    metrics = run(counter, Tree(), 3, 1 + 2 * 20 + 1, "fixed")
    # 20 whole rounds of two tokens; the last had room for one token and drafted nothing.
    assert metrics.rounds == 21
    assert metrics.drafted_tokens == 60
    assert metrics.accepted_tokens == 20
    assert metrics.acceptance_rate == 20 / 60
    assert metrics.alpha == 0.5
    assert metrics.acceptance_length == 2.0
    assert metrics.acceptance_rate_per_position == [1.0, 0.0]
    assert metrics.alpha_per_position == [1.0, 0.0]


def test_full_rounds_without_a_rejection(counter: Path) -> None:
    # All accepted: no first rejection, so alpha is 1 although every round ended.
    class One(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            return super().propose(tokens, 1)

    metrics = run(counter, One(), 4, 22)
    assert metrics.acceptance_rate_per_position == [1.0]
    assert metrics.alpha == 1.0
    assert metrics.acceptance_length == 2.0


def test_end_token_in_a_draft_counts_what_came_out(counter: Path) -> None:
    for length in range(1, 15):
        stop = greedy(60, stop_token_ids=[length])
        text_stop = greedy(60, stop=chr(64 + length))
        with Engine(counter, Counting(), num_speculative_tokens=6, **SMALL) as engine:
            by_token = engine.generate([0], stop)
            by_text = engine.generate([64], text_stop)
        for output in (by_token, by_text):
            assert_identities(output)
            metrics = output.metrics
            assert metrics.completion_tokens == length
            assert metrics.rounds == -(-(length - 1) // 7)
            assert metrics.truncated_rounds == min(metrics.rounds, 1)


def test_batch_and_alone_count_alike(l2: Path) -> None:
    prompts = [[i, i + 1, i] for i in range(6)]
    with Engine(l2, NGram(prompt_lookup_min=1), **SMALL) as engine:
        together = engine.generate(prompts, greedy(60))
        alone = [engine.generate(one, greedy(60)) for one in prompts]
    for one, other in zip(together, alone, strict=True):
        for field in fields(Metrics):
            if not field.name.endswith("_seconds"):
                assert getattr(one.metrics, field.name) == getattr(other.metrics, field.name)


def test_seconds(l2: Path, l2_other: Path) -> None:
    for drafter in (None, "ngram", DraftModel(model=l2_other)):
        with Engine(l2, drafter, **SMALL) as engine:
            metrics = engine.generate([1, 2, 3] * 20, SamplingParams(max_tokens=100)).metrics
        parts = metrics.draft_seconds + metrics.verify_seconds + metrics.sample_seconds
        assert 0 < metrics.prefill_seconds <= metrics.ttft_seconds
        assert metrics.verify_seconds > 0
        assert metrics.sample_seconds > 0
        assert metrics.draft_seconds >= 0
        assert parts + metrics.prefill_seconds <= metrics.total_seconds
        assert metrics.ttft_seconds + 99 * metrics.tpot_seconds == pytest.approx(
            metrics.total_seconds
        )
        assert metrics.tokens_per_second == pytest.approx(1 / metrics.tpot_seconds)
        if isinstance(drafter, DraftModel):
            assert metrics.draft_seconds > 0


def test_a_drafter_that_is_given_is_used(counter: Path) -> None:
    for drafter in ("ngram", NGram(), DraftModel(model=counter), counter, str(counter), Counting()):
        with Engine(counter, drafter, **SMALL) as engine:
            metrics = engine.generate([*range(40), 0, 1, 2], greedy(20)).metrics
        assert metrics.rounds > 0
        assert metrics.drafted_tokens > 0
        assert metrics.acceptance_rate == 1.0


def test_text_of_the_metrics(counter: Path) -> None:
    text = str(run(counter, Counting(), 5, 64))
    assert text.startswith("64 tokens: 1 + 52 accepted + 11 rounds · τ 6.00 · α 1.00")
