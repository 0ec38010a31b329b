"""The law of the tokens: exact on models whose law is known, and as transformers filters it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import HalfRight, assert_same, greedy, known
from reference_sampler import assert_law, processed, softmax

import specrt
from specrt import (
    DraftTree,
    Engine,
    InvalidArgumentError,
    RequestOutput,
    SamplingParams,
    Speculation,
    StructuredOutputs,
)
from specrt.drafters import DraftModel, NGram

V = 16
OPTIONS: dict[str, Any] = {"max_model_len": 16, "max_batch_size": 256, "threads": 1}


def table(seed: int, spread: float = 1.5) -> np.ndarray:
    """Random logits of a bigram model."""
    return np.random.default_rng(seed).normal(0, spread, (V, V)).astype(np.float32)


def draw(engine: Engine, count: int, first_seed: int = 0, **params: Any) -> np.ndarray:
    """Outputs of many seeds, one a row."""
    outputs = engine.generate(
        [[0]] * count, [SamplingParams(seed=first_seed + i, **params) for i in range(count)]
    )
    return np.array([one.token_ids for one in outputs])


def counts_of(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=V)


def pair_counts(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.bincount(first * V + second, minlength=V * V).reshape(V, V)


class Guess(specrt.Drafter):
    """A tree of the likeliest tokens: three, and two below each of them."""

    def __init__(self, logits: np.ndarray) -> None:
        self.best = np.argsort(-logits, axis=-1, kind="stable")

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        for one in self.best[tokens[-1]][:3]:
            ids.append(int(one))
            parents.append(-1)
        for parent in range(3):
            for one in self.best[ids[parent]][:2]:
                ids.append(int(one))
                parents.append(parent)
        return DraftTree(ids[:budget], parents[:budget])


@pytest.mark.parametrize("kind", ["plain", "model", "sharp model", "tree"])
def test_law_at_every_position(kind: str, make_bigram: Callable[..., Path]) -> None:
    logits = table(1)
    drafter: Any = {
        "plain": lambda: None,
        "model": lambda: DraftModel(model=make_bigram(logits + 0.7 * table(2))),
        "sharp model": lambda: DraftModel(model=make_bigram(4.0 * logits)),
        "tree": lambda: Guess(logits),
    }[kind]()
    gamma = None if drafter is None else 2 if kind != "tree" else 9
    with Engine(make_bigram(logits), drafter, num_speculative_tokens=gamma, **OPTIONS) as engine:
        # Prefill's token, two drafts, the bonus token, and the next round's first draft.
        tokens = draw(engine, 12000 if kind == "plain" else 6000, temperature=1.0, max_tokens=5)
    law = softmax(logits)
    marginal = np.eye(V)[0]
    for position in range(5):
        before = marginal
        marginal = before @ law
        assert_law(counts_of(tokens[:, position]), marginal, (kind, position))
        if position:
            pairs = pair_counts(tokens[:, position - 1], tokens[:, position])
            assert_law(pairs, before[:, None] * law, (kind, "pair", position))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.25, "top_p": 0.6},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": V},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.97},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.7, "top_k": 8, "top_p": 0.8},
    {"temperature": 0.6, "top_k": 6, "min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
]


def filtered(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """The law that transformers' processors leave, in the order in which it applies them."""
    return np.array([softmax(processed(row, [0], [], params)) for row in logits])


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_as_in_transformers(
    params: dict[str, Any], make_bigram: Callable[..., Path]
) -> None:
    logits = table(3, spread=2.0)
    # A drafter that proposes what the filters take away, too.
    draft = DraftModel(model=make_bigram(table(4)))
    with Engine(make_bigram(logits), draft, num_speculative_tokens=2, **OPTIONS) as engine:
        tokens = draw(engine, 2500, max_tokens=4, **params)
    law = filtered(logits, params)
    marginal = np.eye(V)[0]
    for position in range(4):
        before, marginal = marginal, marginal @ law
        assert_law(counts_of(tokens[:, position]), marginal, (params, position))
        if position:
            pairs = pair_counts(tokens[:, position - 1], tokens[:, position])
            assert_law(pairs, before[:, None] * law, (params, "pair", position))


def test_temperatures_in_one_batch(make_bigram: Callable[..., Path]) -> None:
    logits = table(5)
    model = make_bigram(logits)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-7},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 1e-5},
        {"temperature": 100.0},
        {"temperature": 1e30},
        {"temperature": 1.0},
    ]
    params = [SamplingParams(max_tokens=12, seed=3, logprobs=1, **one) for one in settings]
    best = [0]
    for _ in range(12):
        best.append(int(logits[best[-1]].argmax()))
    options = {**OPTIONS, "num_speculative_tokens": 3}
    with Engine(model, **OPTIONS) as engine:
        expected = engine.generate([[0]] * len(params), params)
    with Engine(model, HalfRight(known(expected), V), **options) as engine:
        outputs = engine.generate([[0]] * len(params), params)
    assert_same(outputs, expected, "temperatures")
    for setting, output in zip(settings[:7], outputs, strict=False):
        assert output.token_ids == best[1:], setting
    for output in outputs:
        assert len(output.token_ids) == 12
        assert all(np.isfinite(one.logprob) for step in output.logprobs for one in step.values())
    with Engine(model, **OPTIONS) as engine:
        for temperature in (100.0, 1e30):
            tokens = draw(engine, 4000, temperature=temperature, max_tokens=1)
            law = softmax(logits[:1] / temperature)
            assert_law(counts_of(tokens[:, 0]), law, temperature)


def test_equal_logits_go_to_the_lower_id(make_bigram: Callable[..., Path]) -> None:
    logits = np.zeros((V, V), np.float32)
    logits[:, [5, 9, 12]] = 3.0
    with Engine(make_bigram(logits), NGram(prompt_lookup_min=1), **OPTIONS) as engine:
        assert engine.generate([9], greedy(6)).token_ids == [5] * 6
        for params in ({"top_k": 1}, {"top_p": 1e-6}):
            assert set(draw(engine, 50, temperature=1.0, max_tokens=4, **params).ravel()) == {5}
        # Two of three equals: the lower ids again. By min_p all three stay.
        for params, left in (({"top_k": 2}, {5, 9}), ({"min_p": 1.0}, {5, 9, 12})):
            tokens = draw(engine, 50, temperature=1.0, max_tokens=4, **params)
            assert set(tokens.ravel()) == left


def test_self_draft_is_always_accepted(l2: Path) -> None:
    draft = DraftModel(model=l2, num_speculative_tokens=5)
    with Engine(l2, draft, max_model_len=128, max_batch_size=16, threads=1) as engine:
        outputs = engine.generate(
            [[i] for i in range(16)],
            [
                SamplingParams(max_tokens=60, seed=i, temperature=i / 8, top_p=1 - i / 40)
                for i in range(16)
            ],
        )
    for output in outputs:
        assert output.metrics.acceptance_rate == 1.0
        assert output.metrics.alpha == 1.0


# Seeds.


def test_unseeded_requests_differ_and_tell_their_seed(make_bigram: Callable[..., Path]) -> None:
    logits = table(6)
    params = SamplingParams(temperature=1.0, max_tokens=8)
    with Engine(make_bigram(logits), "ngram", **OPTIONS) as engine:
        outputs = engine.generate([[0]] * 100, params)
        one_by_one = [engine.generate([0], params) for _ in range(20)]
        assert len({tuple(one.token_ids) for one in outputs}) > 50
        assert len({tuple(one.token_ids) for one in one_by_one}) > 10
        assert len({one.seed for one in [*outputs, *one_by_one]}) == 120
        for output in [*outputs[:20], *one_by_one]:
            assert 0 <= output.seed < 2**64
            again = engine.generate([0], dataclasses.replace(params, seed=output.seed))
            assert_same([again], [output], output.seed)


def test_seeded_request_does_not_depend_on_others(l2: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=12, max_tokens=20)
    other = SamplingParams(temperature=1.0, max_tokens=15)
    with Engine(l2, "ngram", max_model_len=64, max_batch_size=8, threads=1) as engine:
        expected = engine.generate([5, 6, 7], params)
        for count in range(10):
            engine.generate([count], other)
        assert_same([engine.generate([5, 6, 7], params)], [expected], "after others")
        mixed = engine.generate([[1], [5, 6, 7], [2, 3]], [other, params, other])
        assert_same([mixed[1]], [expected], "beside others")
        assert (
            engine.generate(
                [5, 6, 7], SamplingParams(temperature=1.0, seed=13, max_tokens=20)
            ).token_ids
            != expected.token_ids
        )


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_of_all_sizes(seed: int, make_bigram: Callable[..., Path]) -> None:
    with Engine(make_bigram(table(7)), **OPTIONS) as engine:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=12)
        one, two = engine.generate([[0], [0]], params)
        assert_same([one], [two], seed)
        assert one.seed == seed
        high = dataclasses.replace(params, seed=seed ^ (1 << 40))
        assert engine.generate([0], high).token_ids != one.token_ids


# Log-probabilities.


def test_logprobs_are_raw_and_complete(make_bigram: Callable[..., Path]) -> None:
    logits = table(8)
    model = make_bigram(logits)
    law = np.log(softmax(logits))
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 2.0},
    ]
    for drafter in (None, NGram(prompt_lookup_min=1), DraftModel(model=model), Guess(logits)):
        with Engine(model, drafter, **OPTIONS) as engine:
            for setting in settings:
                for k in (0, 1, 3, V):
                    output = engine.generate(
                        [4], SamplingParams(max_tokens=9, seed=2, logprobs=k, **setting)
                    )
                    check_logprobs(output, law, k)
                assert engine.generate([4], SamplingParams(**setting)).logprobs is None


def check_logprobs(output: RequestOutput, law: np.ndarray, k: int) -> None:
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    last = output.prompt_token_ids[-1]
    for token, step in zip(output.token_ids, output.logprobs, strict=True):
        order = np.argsort(-law[last], kind="stable").tolist()
        wanted = [token, *(one for one in order[:k] if one != token)]
        assert list(step) == wanted
        for one, value in step.items():
            assert value.logprob == pytest.approx(law[last, one], abs=1e-5)
            assert value.rank == order.index(one) + 1
        last = token


@pytest.mark.parametrize("gamma", range(9))
def test_one_logprob_a_token(l2: Path, gamma: int) -> None:
    draft = DraftModel(model=l2)
    options: dict[str, Any] = {"max_model_len": 64, "max_batch_size": 10, "threads": 1}
    with Engine(l2, draft, num_speculative_tokens=gamma, **options) as engine:
        params = [greedy(count, logprobs=2) for count in range(10)]
        for count, output in enumerate(engine.generate([[7, 8]] * 10, params)):
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == count


# Every field.

GOOD_AND_BAD: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([0, 1, 30, 2**40, None], [-1, 1.5, "3", True, 2**63]),
    "temperature": (
        [0, 0.0, 0.5, 2, 100.0],
        [-0.1, float("nan"), float("inf"), "1", None, True, 10**400],
    ),
    "top_p": ([1, 1.0, 0.1, 1e-9], [0, 0.0, -0.1, 1.1, float("nan"), "x", None, True, 10**400]),
    "top_k": ([0, -1, 1, 5, 2**40], [-2, 1.5, "x", None, True, 2**63]),
    "min_p": ([0, 0.0, 0.2, 1], [-0.1, 1.1, float("nan"), "x", None, False]),
    "seed": ([None, 0, 2**64 - 1], [-1, 2**64, 1.5, "x", True]),
    "stop": ([None, "a", ["a", "bc"], (), ("\n",)], ["", [""], [1], b"a", 5, [None], ["a", ""]]),
    "stop_token_ids": (
        [None, [], [1, 2], (3,)],
        ["1", b"1", [1.5], [True], 5, [2**31], [-1], ["a"], [None]],
    ),
    "ignore_eos": ([False, True], [1, 0, None, "yes"]),
    "skip_special_tokens": ([False, True], [1, None, "no"]),
    "include_stop_str_in_output": ([False, True], [1, None, ""]),
    "logprobs": ([None, 0, 3], [-1, 1.5, True, "x"]),
    "prompt_logprobs": ([None, 0, 3], [-1, 1.5, True, "x"]),
    "min_tokens": ([0, 1, 256], [-1, 257, 1.5, "3", None, True, 2**63]),
    "n": ([1, 2, 100], [0, -1, 1.5, "2", None, True, 2**63]),
    "repetition_penalty": (
        [1, 1.0, 1.3, 0.5],
        [0, 0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60, "x", None, True, 10**400],
    ),
    "presence_penalty": (
        [0, 0.0, 1.5, -2, 100.0],
        [-101, 100.5, float("nan"), float("inf"), "x", None, True, 10**400],
    ),
    "frequency_penalty": (
        [0, 0.0, 1.5, -2, 100.0],
        [-101, 100.5, float("nan"), float("inf"), "x", None, True, 10**400],
    ),
    "logit_bias": (
        [None, {}, {1: 2}, {0: -100.0, 5: 3.5}, {1: float("-inf")}],
        [
            *([1], "x", 5, {"1": 1.0}, {1: "x"}, {1: None}, {1: True}, {True: 1.0}, {1.5: 1.0}),
            *({-1: 1.0}, {2**31: 1.0}, {1: float("nan")}, {1: float("inf")}, {1: 10**400}),
        ],
    ),
    "allowed_token_ids": (
        [None, [1], (2, 3), range(5)],
        [[], "1", b"1", 5, [1.5], [True], [-1], [2**31], [None], {1}],
    ),
    "bad_words": ([None, [], ["a"], ("ab", " c")], ["a", b"a", 5, [""], [1], [None], [b"a"]]),
    "speculation": (
        [None, Speculation(), Speculation(drafter=False), Speculation(policy="fixed")],
        ["fixed", {"policy": "fixed"}, 5, True, Speculation],
    ),
    "posterior_threshold": ([None, 0.09, 1], [0, -0.1, 1.1, float("nan"), "x", True]),
    "posterior_alpha": ([None, 0.3, 1], [0, -0.1, float("nan"), float("inf"), "x", True]),
    "structured_outputs": (
        [None, StructuredOutputs(regex="a+"), StructuredOutputs(choice=["a"])],
        ["a+", {"regex": "a+"}, 5, True, StructuredOutputs],
    ),
}


def test_every_field_is_known_here() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(GOOD_AND_BAD)
    # What `typical` alone reads is shown in test_typical.py, speculation in test_policies.py.
    assert names - {"posterior_threshold", "posterior_alpha", "speculation"} == set(SHOWS)


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_bad_values_are_refused_by_name(name: str) -> None:
    good, bad = GOOD_AND_BAD[name]
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
            SamplingParams(**{name: value})


def test_prompt_logprobs_need_a_token() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[prompt_logprobs\].*max_tokens"):
        SamplingParams(prompt_logprobs=1, max_tokens=0)


def test_params_cannot_be_changed_or_given_by_position() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(3)  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


SHOWS: dict[str, tuple[dict[str, Any], Any]] = {
    "max_tokens": ({}, 7),
    "temperature": ({}, 3.0),
    "top_p": ({"temperature": 3.0}, 0.3),
    "top_k": ({"temperature": 3.0}, 2),
    "min_p": ({"temperature": 3.0}, 0.7),
    "seed": ({"temperature": 3.0}, 77),
    "stop": ({"temperature": 3.0}, list("abcdefghijklmnopqrstuvwxyz")),
    "stop_token_ids": ({"temperature": 3.0}, list(range(0, 256, 3))),
    "ignore_eos": ({"temperature": 3.0, "max_tokens": 120}, True),
    "skip_special_tokens": ({"temperature": 3.0, "ignore_eos": True, "max_tokens": 120}, False),
    "include_stop_str_in_output": ({"temperature": 3.0, "stop_token_ids": list(range(256))}, True),
    "logprobs": ({}, 2),
    "prompt_logprobs": ({}, 2),
    "min_tokens": ({"temperature": 3.0, "stop_token_ids": list(range(0, 256, 3))}, 20),
    "n": ({"temperature": 3.0}, 3),
    "repetition_penalty": ({}, 1.8),
    "presence_penalty": ({}, 20.0),
    "frequency_penalty": ({}, 4.0),
    "logit_bias": ({}, dict.fromkeys(range(0, 256, 3), 20.0)),
    "allowed_token_ids": ({}, list(range(0, 256, 2))),
    "bad_words": ({"temperature": 3.0}, list("abcdefghijklmnopqrstuvwxyz")),
    "structured_outputs": ({}, StructuredOutputs(regex="[0-9]+")),
}
"""A base, and a value of the field that must show in the outputs, drafter or not."""


@pytest.mark.parametrize("name", SHOWS)
def test_every_field_shows_and_holds_with_a_drafter(name: str, tmp_path: Path) -> None:
    model = tiny.byte_tokenizer(
        tiny.tiny_llama(tmp_path / "l2", vocab=264, eos_token_id=[10, 100, 200])
    )
    base, value = SHOWS[name]
    common = {"max_tokens": 40, "seed": 1, **base}
    prompts: Sequence[list[int]] = [[i, i + 1] for i in range(8)]
    given = [SamplingParams(**common), SamplingParams(**{**common, name: value})]
    options: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 8, "threads": 1}
    with Engine(model, **options) as engine:
        without, with_it = (engine.generate(prompts, one) for one in given)

    def visible(outputs: list[RequestOutput]) -> list[Any]:
        return [
            (
                one.prompt_logprobs,
                [(each.text, each.token_ids, each.logprobs) for each in one.outputs],
            )
            for one in outputs
        ]

    assert visible(without) != visible(with_it)
    half = HalfRight(known(with_it), 264)
    for drafter in (half, DraftModel(model=model), NGram(prompt_lookup_min=1)):
        with Engine(model, drafter, **options) as engine:
            assert_same(engine.generate(prompts, given[1]), with_it, (name, drafter))


def test_values_that_only_a_model_can_judge(l2: Path) -> None:
    with Engine(l2, max_model_len=64, max_batch_size=1, threads=1) as engine:
        for params, name in (
            (SamplingParams(stop_token_ids=[264]), "stop_token_ids"),
            (SamplingParams(logprobs=265), "logprobs"),
            (SamplingParams(prompt_logprobs=265), "prompt_logprobs"),
            (SamplingParams(logit_bias={264: 1.0}), "logit_bias"),
            (SamplingParams(allowed_token_ids=[1, 264]), "allowed_token_ids"),
        ):
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\].*264"):
                engine.generate([1], params)
        assert len(engine.generate([1], greedy(1, logprobs=264)).logprobs[0]) == 264
        assert engine.generate([1], greedy(3, stop_token_ids=[263])).token_ids
        huge = SamplingParams(max_tokens=2**62, top_k=2**62, temperature=1.0, seed=1)
        assert len(engine.generate([1], huge).token_ids) == 63
