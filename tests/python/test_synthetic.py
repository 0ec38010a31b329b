"""Synthetic acceptance: drafts accepted with preset probabilities, whatever they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers import Counting, assert_identities, greedy

import specrt
from specrt import Engine, SamplingParams, Speculation, StructuredOutputs
from specrt.drafters import DraftModel, Merge, NGram, SelfDraft, Suffix, Synthetic
from specrt.errors import InvalidArgumentError, UnsupportedError

SIZES: dict[str, Any] = {"max_model_len": 1024, "max_batch_size": 4, "threads": 1}


def tau(alpha: float, gamma: int) -> float:
    """Tokens a round of drafts of which each is accepted with the same probability."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def too_rare(successes: int, trials: int, rate: float) -> bool:
    """Whether so many or anything rarer has a chance under 1e-6 (exact binomial tail)."""

    def log_mass(k: int) -> float:
        choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        return choose + k * math.log(rate) + (trials - k) * math.log1p(-rate)

    below = successes < rate * trials
    tail = range(successes + 1) if below else range(successes, trials + 1)
    return sum(math.exp(log_mass(k)) for k in tail) < 1e-6


def run(model: Path, drafter: Any, gamma: int, **options: Any) -> specrt.Metrics:
    sizes = {**SIZES, "policy": "fixed", "num_speculative_tokens": gamma, **options}
    with Engine(model, drafter, **sizes) as engine:
        output = engine.generate([1, 2, 3], greedy(1000, ignore_eos=True))
    assert not output.lossless
    assert_identities(output)
    return output.metrics


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_rate_and_length_agree_with_theory(counter: Path, alpha: float) -> None:
    """The free drafter's tokens are all wrong for a model that counts."""
    gamma = 5
    metrics = run(counter, Synthetic(), gamma, synthetic_acceptance_rate=alpha)
    accepted = sum(metrics.accepted_per_position)
    decided = accepted + sum(metrics.rejected_per_position)
    assert not too_rare(accepted, decided, alpha)
    assert decided > 200
    # The theory's τ, from its own α: exact but for rounds that ended in full acceptance.
    assert metrics.acceptance_length == pytest.approx(tau(alpha, gamma), rel=0.2)
    assert metrics.drafted_tokens >= gamma * (metrics.rounds - 1) - gamma


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends(counter: Path, alpha: float) -> None:
    # With 0 nothing is accepted, though every draft is right; with 1 all are, and none is.
    right = run(counter, Counting(), 4, synthetic_acceptance_rate=0.0)
    assert right.accepted_tokens == 0
    assert right.drafted_tokens > 0
    wrong = run(counter, Counting(step=2), 4, synthetic_acceptance_rate=1.0)
    assert wrong.alpha == 1.0
    assert wrong.acceptance_length == 5.0


def test_with_none_accepted_the_text_is_the_targets(counter: Path) -> None:
    with Engine(counter, Counting(), synthetic_acceptance_rate=0.0, **SIZES) as engine:
        output = engine.generate([7], greedy(20))
    assert output.token_ids == [8 + i for i in range(20)]
    assert not output.lossless


def test_rates_by_position(counter: Path) -> None:
    rates = [0.9, 0.5, 0.2]
    metrics = run(counter, Synthetic(), 5, synthetic_acceptance_rates=rates)
    for position in range(4):
        accepted = metrics.accepted_per_position[position]
        decided = accepted + metrics.rejected_per_position[position]
        assert not too_rare(accepted, decided, rates[min(position, 2)]), position
    assert metrics.alpha_per_position[0] > metrics.alpha_per_position[1] + 0.1


def test_every_drafter_and_way_to_choose(l2: Path, l2_close: Path) -> None:
    """The greedy fast path, logits, log-probabilities, trees, merged drafts."""
    settings = [
        greedy(150),
        greedy(150, logprobs=2),
        greedy(150, repetition_penalty=1.2),
        SamplingParams(max_tokens=150, temperature=0.9, seed=3),
    ]
    for drafter in (
        Synthetic(),
        NGram(),
        Suffix(suffix_decoding_use_tree_spec=True),
        DraftModel(model=l2_close),
        SelfDraft(layers=1),
        Merge([NGram(), Synthetic()]),
    ):
        options = {**SIZES, "num_speculative_tokens": 3, "policy": "fixed"}
        with Engine(l2, drafter, synthetic_acceptance_rate=0.6, **options) as engine:
            outputs = engine.generate([[1, 2, 3 + i] for i in range(4)], settings)
            again = engine.generate([1, 2, 6], settings[3])
        accepted = rejected = 0
        for output in outputs:
            assert not output.lossless
            assert_identities(output)
            if output.logprobs is not None:
                assert all(
                    next(iter(step)) == token
                    for step, token in zip(output.logprobs, output.token_ids, strict=True)
                )
            accepted += sum(output.metrics.accepted_per_position)
            rejected += sum(output.metrics.rejected_per_position)
        if isinstance(drafter, (Synthetic, DraftModel, SelfDraft)):  # chains alone
            assert not too_rare(accepted, accepted + rejected, 0.6), drafter
            # The seed repeats it, whatever ran beside it.
            assert again.token_ids == outputs[3].token_ids
        assert accepted > 0


def test_policies_see_it(counter: Path) -> None:
    # The brake takes hopeless drafts back, as it would a drafter's own.
    options = {"policy": "brake", "cpu_isa": "scalar"}
    low = run(counter, Synthetic(), 4, synthetic_acceptance_rate=0.02, **options)
    high = run(counter, Synthetic(), 4, synthetic_acceptance_rate=0.98, **options)
    assert low.drafted_tokens < low.rounds
    assert high.drafted_tokens > 3 * (high.rounds - 1)


def test_refusals(counter: Path, l2: Path) -> None:
    for options, name in (
        ({"synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate"),
        ({"synthetic_acceptance_rate": float("nan")}, "synthetic_acceptance_rate"),
        ({"synthetic_acceptance_rate": True}, "synthetic_acceptance_rate"),
        ({"synthetic_acceptance_rates": []}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [0.5, -0.1]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates"),
        (
            {"synthetic_acceptance_rate": 0.5, "synthetic_acceptance_rates": [0.5]},
            "synthetic_acceptance_rates",
        ),
        ({"synthetic_acceptance_rate": 0.5, "verification": "rejection"}, "verification"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
            Engine(counter, "ngram", **options, **SIZES)
    with pytest.raises(InvalidArgumentError, match=r"\[synthetic_acceptance_rate\] expected a dr"):
        Engine(counter, synthetic_acceptance_rate=0.5, **SIZES)
    with Engine(l2, "ngram", synthetic_acceptance_rate=0.5, **SIZES) as engine:
        with pytest.raises(InvalidArgumentError, match=r"\[verification\]"):
            engine.generate(
                [1], greedy(4, speculation=Speculation(verification="block"), temperature=1.0)
            )
        with pytest.raises(UnsupportedError, match=r"\[structured_outputs\]"):
            engine.generate([1], greedy(4, structured_outputs=StructuredOutputs(regex="[0-9]+")))
