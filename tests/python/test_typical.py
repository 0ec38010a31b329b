"""`typical` verification: lossy, asked for, told; against the published rule in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Branching, Counting, Oracle, assert_identities, assert_same, greedy, known

from specrt import (
    Drafter,
    DraftTree,
    Engine,
    InvalidArgumentError,
    SamplingParams,
    StructuredOutputs,
    UnsupportedError,
)
from specrt.drafters import DraftModel, NGram, SelfDraft

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 4, "threads": 1}
V = 16


def bound(law: np.ndarray, threshold: float, alpha: float) -> float:
    """min(eps, delta * exp(-H)), with H = -sum p log(p + 1e-5)."""
    return float(min(threshold, alpha * np.exp(np.sum(law * np.log(law + 1e-5)))))


class Ranked(Drafter):
    """Trees of the ranks that `paths` name, by a bigram table: always the same tree."""

    def __init__(self, table: np.ndarray, paths: list[list[int]]) -> None:
        self.order = np.argsort(-table, axis=1, kind="stable")
        self.paths = paths
        self.drafts: list[tuple[list[int], DraftTree]] = []

    def propose(self, tokens: list[int], budget: int) -> DraftTree:
        places: dict[tuple[int, ...], int] = {}
        drafted: list[int] = []
        parents: list[int] = []
        for path in self.paths[:budget]:
            parent = places.get(tuple(path[:-1]), -1)
            last = tokens[-1] if parent < 0 else drafted[parent]
            places[tuple(path)] = len(drafted)
            drafted.append(int(self.order[last, path[-1]]))
            parents.append(parent)
        tree = DraftTree(drafted, parents)
        self.drafts.append((list(tokens), tree))
        return tree


PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]]


def accepted(law: np.ndarray, last: int, tree: DraftTree, eps: float, delta: float) -> list[int]:
    """The tokens of the longest accepted path, of several the likeliest, then the first."""
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for leaf in range(len(tree)):
        path = [leaf]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        taken: list[int] = []
        likelihood = 0.0
        before = last
        for node in path:
            token = tree.tokens[node]
            if law[before, token] <= bound(law[before], eps, delta):
                break
            taken.append(token)
            likelihood += float(np.log(law[before, token]))
            before = token
        if (len(taken), likelihood) > best[:2]:
            best = (len(taken), likelihood, taken)
    return best[2]


@pytest.mark.parametrize(
    ("temperature", "given", "eps", "delta"),
    [
        (1.0, {}, 0.09, 0.3),
        (0.6, {}, 0.09, 0.3),
        (1.0, {"posterior_threshold": 0.3, "posterior_alpha": 0.09}, 0.3, 0.09),
        (1.4, {"posterior_threshold": 0.01}, 0.01, 0.3),
    ],
)
def test_every_round_is_the_rules(
    make_bigram: Callable[..., Path],
    temperature: float,
    given: dict[str, float],
    eps: float,
    delta: float,
) -> None:
    table = np.random.default_rng(4).normal(0, 1.6, (V, V)).astype(np.float32)
    law = np.exp(table.astype(np.float64) / temperature)
    law /= law.sum(axis=1, keepdims=True)
    drafter = Ranked(table, PATHS)
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=3, **given)
    with Engine(
        make_bigram(table), drafter, verification="typical",
        num_speculative_tokens=len(PATHS), **SMALL,
    ) as engine:  # fmt: skip
        output = engine.generate([1], params)
        assert_identities(output)
        assert output.lossless is False
        first = list(drafter.drafts)
        assert engine.generate([1], params).token_ids == output.token_ids  # the same seed
    text = [1, *output.token_ids]
    for at, (tokens, tree) in enumerate(first):
        assert text[: len(tokens)] == tokens
        expected = accepted(law, tokens[-1], tree, eps, delta)
        end = len(first[at + 1][0]) if at + 1 < len(first) else len(text)
        if end == len(text):
            break  # cut by max_tokens
        assert text[len(tokens) : end - 1] == expected
    assert 0 < output.metrics.accepted_tokens < output.metrics.drafted_tokens


def test_greedy_is_exact_and_says_lossy(l2: Path) -> None:
    prompts = [[i, 2 * i, 3] for i in range(4)]
    with Engine(l2, **SMALL) as engine:
        expected = engine.generate(prompts, greedy(40))
    assert all(one.lossless for one in expected)
    texts = known(expected)
    for drafter in (
        NGram(prompt_lookup_min=1),
        DraftModel(model=l2),
        SelfDraft(precision="int4"),
        SelfDraft(layers=1),
        Branching(texts, 264),
        Oracle(texts, 264),
        None,
    ):
        with Engine(l2, drafter, verification="typical", **SMALL) as engine:
            outputs = engine.generate(prompts, greedy(40))
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert [one.logprobs for one in outputs] == [one.logprobs for one in expected]
        assert not any(one.lossless for one in outputs)


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_its_parameters_are_refused_elsewhere(counter: Path, verification: str) -> None:
    with Engine(counter, Counting(), verification=verification, **SMALL) as engine:
        assert engine.generate([1], greedy(3)).lossless is True
        for name in ("posterior_threshold", "posterior_alpha"):
            params = SamplingParams(temperature=1.0, **{name: 0.09})
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\].*typical"):
                engine.generate([1], params)


def test_its_parameters_are_checked() -> None:
    for name, values in (
        ("posterior_threshold", (0, 0.0, -0.1, 1.01, float("nan"), "0.1", True)),
        ("posterior_alpha", (0.0, -1, float("inf"), float("nan"), [0.3], False)),
    ):
        for value in values:
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}\]"):
                SamplingParams(**{name: value})
    SamplingParams(posterior_threshold=1, posterior_alpha=30)


def test_with_logprobs_stops_and_n(l2_eos: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=8, n=3, logprobs=2, stop="q")
    with Engine(l2_eos, SelfDraft(precision="int8"), verification="typical", **SMALL) as engine:
        output = engine.generate([5, 6], params)
        again = engine.generate([5, 6], params)
    assert_same([again], [output], "again")
    assert_identities(output)
    assert output.metrics.accepted_tokens > 0
    with Engine(l2_eos, **SMALL) as engine:  # raw log-probabilities of the path that was taken
        for one in output.outputs:
            whole = [5, 6, *one.token_ids]
            told = engine.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
            for step, token, logprobs in zip(
                told.prompt_logprobs[2:], one.token_ids, one.logprobs, strict=True
            ):
                assert step[token].logprob == logprobs[token].logprob


def test_no_grammars(l2: Path) -> None:
    with (
        Engine(l2, "ngram", verification="typical", **SMALL) as engine,
        pytest.raises(UnsupportedError, match=r"\[structured_outputs\].*typical"),
    ):
        engine.generate([1], SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]+")))


def test_full_passes_have_room_for_whole_drafts(l2: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[max_num_batched_tokens\].*'typical'"):
        Engine(l2, "ngram", verification="typical", max_num_batched_tokens=16, **SMALL)
