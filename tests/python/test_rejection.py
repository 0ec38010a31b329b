"""`rejection` and `block` verification: the target's law, more of a sampled draft accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import Head, write
from helpers import AlwaysWrong, Branching, HalfRight, Oracle, Tally, assert_same, greedy, known
from reference_sampler import assert_law, processed, softmax

import specrt
from specrt import (
    DraftTree,
    Engine,
    InvalidArgumentError,
    RequestOutput,
    SamplingParams,
    SpecrtError,
)
from specrt.drafters import DraftModel, Eagle3, NGram

V = 16
DRAWS = 20_000
"""For what is most exposed; the rest makes do with `FEWER`."""
FEWER = 7_000
OPTIONS: dict[str, Any] = {
    "max_model_len": 24,
    "max_batch_size": 256,
    "max_num_batched_tokens": 4096,
    "threads": 1,
}
KINDS = ["rejection", "block"]


def table(seed: int, spread: float = 1.2) -> np.ndarray:
    """Random logits of a bigram model."""
    return np.random.default_rng(seed).normal(0, spread, (V, V)).astype(np.float32)


TARGET = table(31)
DRAFT = (0.6 * TARGET + 0.8 * table(32)).astype(np.float32)


def outputs(
    engine: Engine, count: int, tokens: int = 5, prompt: Sequence[int] = (0,), **params: Any
) -> list[RequestOutput]:
    return engine.generate(
        [list(prompt)] * count,
        [SamplingParams(seed=i, max_tokens=tokens, **params) for i in range(count)],
    )


def ids(given: list[RequestOutput]) -> np.ndarray:
    return np.array([one.token_ids for one in given])


def assert_bigram_law(tokens: np.ndarray, law: np.ndarray, what: Any) -> None:
    """Every position, and every two neighbours: drafts, the residual's and the bonus token."""
    marginal = np.eye(V)[0]
    for position in range(tokens.shape[1]):
        before, marginal = marginal, marginal @ law
        column = tokens[:, position]
        assert_law(np.bincount(column, minlength=V), marginal, (what, position))
        if position:
            pairs = np.bincount(tokens[:, position - 1] * V + column, minlength=V * V)
            assert_law(pairs, before[:, None] * law, (what, "pair", position))


class Sampled(specrt.Drafter):
    """A tree of samples: each node's children without replacement, from the law that it tells."""

    def __init__(self, logits: np.ndarray, widths: Sequence[int]) -> None:
        self.law = softmax(logits)
        self.widths = widths
        self.random = random.Random(5)

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        laws: dict[int, np.ndarray] = {}
        level = [(-1, tokens[-1])]
        for width in self.widths:
            below = []
            for parent, last in level:
                left = self.law[last].tolist()
                laws[parent] = self.law[last]
                for _ in range(width):
                    sums = list(accumulate(left))
                    token = self.random.choices(range(V), cum_weights=sums)[0]
                    left[token] = 0.0
                    below.append((len(ids), token))
                    ids.append(token)
                    parents.append(parent)
            level = below
        tree = DraftTree(ids, parents)
        for node, law in laws.items():
            tree.set_distribution(node, law.tolist())
        return tree


class Likely(specrt.Drafter):
    """The likeliest tokens, not sampled: as many at each depth as `widths` says."""

    def __init__(self, logits: np.ndarray, widths: Sequence[int]) -> None:
        self.best = np.argsort(-logits, axis=-1, kind="stable").tolist()
        self.widths = widths

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        level = [(-1, tokens[-1])]
        for width in self.widths:
            below = []
            for parent, last in level:
                for token in self.best[last][:width]:
                    below.append((len(ids), token))
                    ids.append(token)
                    parents.append(parent)
            level = below
        return DraftTree(ids, parents)


# The law.


@pytest.mark.parametrize("verification", KINDS)
@pytest.mark.parametrize("params", [
    {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.6, "top_k": 5},
], ids=str)  # fmt: skip
def test_law_with_a_draft_model(
    verification: str, params: dict[str, Any], make_bigram: Callable[..., Path]
) -> None:
    draft = DraftModel(model=make_bigram(DRAFT))
    target = make_bigram(TARGET)
    law = np.array([softmax(processed(row, [0], [], params)) for row in TARGET])
    with Engine(
        target, draft, verification=verification, num_speculative_tokens=2, **OPTIONS
    ) as engine:
        given = outputs(engine, DRAWS if params == {"temperature": 1.0} else FEWER, **params)
    assert_bigram_law(ids(given), law, (verification, params))
    tally = Tally()
    tally.add(given)
    assert 0.2 < tally.accepted / tally.drafted < 0.9
    assert all(one.lossless for one in given)


@pytest.mark.parametrize("top_k", [1, 3])
def test_law_with_a_head_that_knows_half_the_tokens(
    top_k: int, make_bigram: Callable[..., Path], tmp_path: Path
) -> None:
    # What is outside its map has q = 0: only the residual can bring it.
    head = Head(
        "eagle3", hidden=V, target_hidden=V, heads=2, kv_heads=1, head_dim=8, ffn=V, vocab=V,
        draft_vocab=V // 2, seed=2,
    )  # fmt: skip
    head.tensors["lm_head.weight"] *= 0.3
    folder = write(tmp_path / "head", head.config(), head.stored())
    spec = Eagle3(folder, top_k=top_k, num_speculative_tokens=4, depth=1, aux_layer_ids=(1, 1, 1))
    target = make_bigram(TARGET)
    with Engine(target, spec, verification="rejection", self_test=False, **OPTIONS) as engine:
        given = outputs(engine, FEWER, tokens=4, temperature=1.0)
    assert_bigram_law(ids(given), softmax(TARGET), top_k)
    rounds = sum(one.metrics.rounds for one in given)
    assert sum(one.metrics.accepted_tokens for one in given) > 0.1 * rounds


@pytest.mark.parametrize("verification", KINDS)
@pytest.mark.parametrize("kind", ["ngram", "chain", "likely chain", "sharp model", "wrong"])
def test_law_of_chains(verification: str, kind: str, make_bigram: Callable[..., Path]) -> None:
    drafter: Any = {
        "ngram": lambda: NGram(prompt_lookup_min=1),
        "chain": lambda: Sampled(DRAFT, [1, 1, 1]),
        "likely chain": lambda: Likely(DRAFT, [1, 1, 1]),
        "sharp model": lambda: DraftModel(model=make_bigram(6.0 * DRAFT)),
        "wrong": lambda: Likely(-TARGET, [1, 1]),
    }[kind]()
    prompt = [4, 0, 7, 9, 1, 3, 0, 7, 2, 0] if kind == "ngram" else [0]
    with Engine(
        make_bigram(TARGET), drafter, verification=verification, num_speculative_tokens=3, **OPTIONS
    ) as engine:
        given = outputs(engine, FEWER, temperature=1.0, prompt=prompt)
    assert_bigram_law(ids(given), softmax(TARGET), (verification, kind))
    assert sum(one.metrics.drafted_tokens for one in given) > FEWER / 4
    accepted = sum(one.metrics.accepted_tokens for one in given)
    assert 0 < accepted < sum(one.metrics.drafted_tokens for one in given)


@pytest.mark.parametrize("kind", ["sampled", "sampled alike", "likely"])
def test_law_of_trees(kind: str, make_bigram: Callable[..., Path]) -> None:
    drafter: Any = {
        "sampled": lambda: Sampled(DRAFT, [3, 2]),
        "sampled alike": lambda: Sampled(TARGET, [2, 2]),
        "likely": lambda: Likely(DRAFT, [3, 2]),
    }[kind]()
    for params in ({"temperature": 1.0}, {"temperature": 0.8, "top_k": 6}):
        law = np.array([softmax(processed(row, [0], [], params)) for row in TARGET])
        with Engine(
            make_bigram(TARGET), drafter, verification="rejection", num_speculative_tokens=9,
            **OPTIONS,
        ) as engine:  # fmt: skip
            many = kind == "sampled" and params == {"temperature": 1.0}
            given = outputs(engine, DRAWS if many else FEWER, tokens=4, **params)
        assert_bigram_law(ids(given), law, (kind, params))
        rounds = sum(one.metrics.rounds for one in given)
        assert sum(one.metrics.accepted_tokens for one in given) > 0.2 * rounds


def test_law_of_a_tree_cut_by_the_budget(make_bigram: Callable[..., Path]) -> None:
    # The first of the siblings, in draw order, stay.
    for budget in (1, 2, 5):
        with Engine(
            make_bigram(TARGET), Sampled(DRAFT, [3, 2]), verification="rejection",
            num_speculative_tokens=budget, **OPTIONS,
        ) as engine:  # fmt: skip
            given = outputs(engine, FEWER, tokens=4, temperature=1.0)
        assert_bigram_law(ids(given), softmax(TARGET), budget)


@pytest.mark.parametrize("verification", KINDS)
@pytest.mark.parametrize("params", [
    {"repetition_penalty": 1.7}, {"presence_penalty": 1.5, "top_k": 7},
    {"frequency_penalty": 1.0, "logit_bias": {3: 1.5, 5: float("-inf")}},
    {"allowed_token_ids": [0, 1, 2, 5, 8, 13], "min_p": 0.05, "presence_penalty": -0.5},
], ids=str)  # fmt: skip
def test_law_with_history(
    verification: str, params: dict[str, Any], make_bigram: Callable[..., Path]
) -> None:
    params = {"temperature": 1.1, **params}
    draft = DraftModel(model=make_bigram(DRAFT))
    with Engine(
        make_bigram(TARGET), draft, verification=verification, num_speculative_tokens=3, **OPTIONS
    ) as engine:
        tokens = ids(outputs(engine, FEWER, tokens=4, **params))

    def law(output: list[int]) -> np.ndarray:
        return softmax(processed(TARGET[[0, *output][-1]], [0], output, params))

    # Of the second and third token, which were drafted, whatever the first was.
    joint = np.zeros((V, V))
    first = law([])
    for a in np.flatnonzero(first):
        second = law([int(a)])
        for b in np.flatnonzero(second):
            joint[b] += first[a] * second[b] * law([int(a), int(b)])
    pairs = np.bincount(tokens[:, 1] * V + tokens[:, 2], minlength=V * V)
    assert_law(pairs, joint, (verification, params))


# What is the same as with `coupled`, and what repeats.


@pytest.mark.parametrize("verification", KINDS)
def test_greedy_is_greedy(l2: Path, l2_close: Path, verification: str) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "max_batch_size": 5, "threads": 1}
    prompts = [[65 + i] * (1 + 4 * i) for i in range(6)]
    params = [
        greedy(40, logprobs=2),
        greedy(40, temperature=1e-7),
        greedy(40, temperature=1.0, top_k=1),
        greedy(40, repetition_penalty=1.3, min_tokens=3),
        greedy(40, temperature=2.0, top_p=1e-9),
        greedy(40, stop_token_ids=list(range(100, 110)), prompt_logprobs=1),
    ]
    with Engine(l2, **options) as engine:
        expected = engine.generate(prompts, params)
    texts = known(expected)
    tally = Tally()
    drafters: list[Any] = [
        None,
        Oracle(texts, 256),
        HalfRight(texts, 256),
        AlwaysWrong(texts, 256),
        NGram(prompt_lookup_min=1),
        DraftModel(model=l2_close),
        DraftModel(model=l2),
    ]
    if verification == "rejection":
        drafters.append(Branching(texts, 256))
    for drafter in drafters:
        for gamma in (None,) if drafter is None else (1, 4, 16):
            with Engine(
                l2, drafter, verification=verification, num_speculative_tokens=gamma,
                check_invariants=True, **options,
            ) as engine:  # fmt: skip
                given = engine.generate(prompts, params)
            assert_same(given, expected, (drafter, gamma))
            tally.add(given)
    tally.assert_mixed()


@pytest.mark.parametrize("verification", KINDS)
def test_repeats_whatever_the_batch(l2: Path, l2_close: Path, verification: str) -> None:
    prompts = [[97 + i] * (1 + 5 * i) for i in range(6)]
    params = [
        SamplingParams(
            max_tokens=40, seed=i, temperature=0.8 + 0.2 * i, top_p=1 - i / 20, logprobs=1
        )
        for i in range(6)
    ]
    options: dict[str, Any] = {"max_model_len": 96, "threads": 1, "check_invariants": True}
    differs = 0
    for drafter in (DraftModel(model=l2_close), NGram(prompt_lookup_min=1)):
        for gamma in (1, 4):
            expected = None
            for changes in (
                {"max_batch_size": 1},
                {"max_batch_size": 3, "block_size": 1},
                {"max_batch_size": 6, "threads": 2},
                {"max_batch_size": 6, "enable_prefix_caching": False},
            ):
                with Engine(
                    l2, drafter, verification=verification, num_speculative_tokens=gamma,
                    **{**options, **changes},
                ) as engine:  # fmt: skip
                    given = engine.generate(prompts, params)
                    again = engine.generate(prompts[2], params[2])
                expected = expected or given
                assert_same(given, expected, (drafter, gamma, changes))
                assert_same([again], [expected[2]], (drafter, gamma, changes))
            with Engine(l2, **{**options, "max_batch_size": 6}) as engine:
                plain = engine.generate(prompts, params)
            differs += [one.token_ids for one in plain] != [one.token_ids for one in expected]
    assert differs > 0  # a law of its own coins, not the bytes of `coupled`


@pytest.mark.parametrize("verification", ["coupled", *KINDS])
def test_self_draft_is_always_accepted(l2: Path, verification: str) -> None:
    draft = DraftModel(model=l2, num_speculative_tokens=5)
    options = {"max_model_len": 128, "max_batch_size": 16, "threads": 1}
    with Engine(l2, draft, verification=verification, **options) as engine:
        given = engine.generate(
            [[i] for i in range(16)],
            [
                SamplingParams(
                    max_tokens=60, seed=i, temperature=i / 8, top_p=1 - i / 40,
                    presence_penalty=(i % 3) / 2, repetition_penalty=1 + (i % 2) / 4,
                )
                for i in range(16)
            ],
        )  # fmt: skip
    for output in given:
        assert output.metrics.acceptance_rate == 1.0
        assert output.metrics.alpha == 1.0


def test_acceptance_of_a_sampled_draft(make_bigram: Callable[..., Path]) -> None:
    # Exact counts at fixed seeds; what the theory says of rounds holds by a wide margin.
    target, draft = make_bigram(TARGET), make_bigram(DRAFT)
    rounds: dict[str, int] = {}
    rate: dict[str, float] = {}
    for verification in ("coupled", *KINDS):
        with Engine(
            target, DraftModel(model=draft), verification=verification, num_speculative_tokens=5,
            policy="fixed", **OPTIONS,
        ) as engine:  # fmt: skip
            given = outputs(engine, 3000, tokens=20, temperature=1.0)
        tally = Tally()
        tally.add(given)
        rounds[verification] = sum(one.metrics.rounds for one in given)
        rate[verification] = sum(one.metrics.alpha for one in given) / len(given)
    assert rounds["rejection"] < 0.98 * rounds["coupled"]
    assert rounds["block"] < 0.995 * rounds["rejection"]
    # One minus the distance of the laws, averaged over where the target goes.
    p, q = softmax(TARGET), softmax(DRAFT)
    stay = np.linalg.matrix_power(p, 50)[0]
    overlap = float((stay * np.minimum(p, q).sum(1)).sum())
    assert rate["rejection"] == pytest.approx(overlap, abs=0.03)


# Errors.


def test_every_request_gets_its_drafts_or_none_starts(l2: Path) -> None:
    # Fewer drafts in a full batch would make an output depend on what else runs.
    sizes: dict[str, Any] = {"max_batch_size": 8, "max_model_len": 64, "threads": 1}
    for verification in KINDS:
        with pytest.raises(InvalidArgumentError, match=r"\[max_num_batched_tokens\]"):
            Engine(
                l2, "ngram", num_speculative_tokens=8, max_num_batched_tokens=71,
                verification=verification, **sizes,
            )  # fmt: skip
    with Engine(l2, "ngram", num_speculative_tokens=8, max_num_batched_tokens=71, **sizes) as one:
        assert one.generate([1], greedy(2)).token_ids


def test_a_draft_that_verification_cannot_use(make_bigram: Callable[..., Path]) -> None:
    class NoLaw(specrt.Drafter):
        """Says that it sampled, and not from what, for every node."""

        def propose(self, tokens: list[int], budget: int) -> DraftTree:
            tree = DraftTree.chain([1, 2, 3])
            tree.set_distribution(-1, [1 / V] * V)
            return tree

    target = make_bigram(TARGET)
    params = SamplingParams(max_tokens=10, seed=1, temperature=1.0)
    for drafter, verification, message in (
        (NoLaw(), "rejection", "probabilities"),
        (NoLaw(), "block", "probabilities"),
        (Likely(TARGET, [2, 2]), "block", "chain"),
    ):
        with Engine(
            target, drafter, verification=verification, num_speculative_tokens=6, **OPTIONS
        ) as engine:
            with pytest.raises(SpecrtError, match=message):
                outputs(engine, 40, tokens=10, temperature=1.0)
            assert engine._decoder.idle
            # A greedy one asks for no law.
            assert len(engine.generate([0], greedy(10)).token_ids) == 10
    # Nobody asks where the target's own choice decides.
    with Engine(target, NoLaw(), **OPTIONS) as engine:
        with_it = engine.generate([0], params)
    with Engine(target, **OPTIONS) as engine:
        assert_same([with_it], [engine.generate([0], params)], "coupled")
