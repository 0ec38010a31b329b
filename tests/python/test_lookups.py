"""Suffix decoding, n-gram trees, merged drafts and the brake, in whole engines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    AlwaysWrong,
    Branching,
    Counting,
    HalfRight,
    Oracle,
    Tally,
    assert_same,
    greedy,
    known,
)

import specrt
from specrt import DraftTree, Engine, InvalidArgumentError, SamplingParams, SpecrtError
from specrt.demo import demo_model_path
from specrt.drafters import DraftModel, Merge, NGram, Suffix, SuffixCache

SMALL: dict[str, Any] = {"max_model_len": 256, "max_batch_size": 8, "threads": 1}
SETTINGS: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"temperature": 0.8, "top_k": 8},
    {"temperature": 1.0, "top_p": 0.7, "logprobs": 0},
    {},
    {"temperature": 0.7, "repetition_penalty": 1.1},
]


def prompts() -> list[list[int]]:
    """Five that repeat themselves and begin alike."""
    draw = np.random.default_rng(4)
    phrase = draw.integers(0, 256, 9).tolist()
    return [phrase * 3 + draw.integers(0, 256, i + 1).tolist() + phrase[:3] for i in range(5)]


def drafters(l2_close: Path, texts: list[list[int]]) -> list[tuple[Any, int]]:
    scripted = HalfRight(texts, 264)
    return [
        ("suffix", 8),
        (Suffix(suffix_decoding_use_tree_spec=True, suffix_decoding_min_token_prob=0.0), 12),
        (Suffix(suffix_decoding_max_cached_requests=0), 5),
        (NGram(num_candidates=3), 12),
        (Merge([NGram(), "suffix"]), 8),
        (Merge([NGram(num_candidates=2), DraftModel(model=l2_close)]), 8),
        (Merge([DraftModel(model=l2_close), scripted, Branching(texts, 264)]), 16),
        (Merge([AlwaysWrong(texts, 264), Oracle(texts, 264)]), 4),
    ]


def test_the_same_bytes(l2: Path, l2_close: Path) -> None:
    params = [greedy(60, **one, seed=7 + i) for i, one in enumerate(SETTINGS)]
    with Engine(l2, **SMALL) as engine:
        expected = [engine.generate(*pair) for pair in zip(prompts(), params, strict=True)]
    tally = Tally()
    for policy in ("brake", "goodput", "fixed"):
        for drafter, gamma in drafters(l2_close, known(expected)):
            options = {"num_speculative_tokens": gamma, "policy": policy, **SMALL}
            with Engine(l2, drafter, check_invariants=True, **options) as engine:
                batch = engine.generate(prompts(), params)
                again = engine.generate(prompts(), params)
                alone = [engine.generate(*pair) for pair in zip(prompts(), params, strict=True)]
            for got in (batch, again, alone):
                assert_same(got, expected, (drafter, policy))
                tally.add(got)
    assert tally.accepted > 1000
    assert tally.drafted - tally.accepted > 1000


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_texts_repeat_whatever_ran_before(
    l2: Path, l2_close: Path, verification: str
) -> None:
    params = [SamplingParams(max_tokens=40, seed=i, temperature=0.9) for i in range(5)]
    sizes = {**SMALL, "num_speculative_tokens": 6, "verification": verification}
    for drafter in (
        "suffix",
        Suffix(suffix_decoding_use_tree_spec=True),
        NGram(num_candidates=2),
        Merge([NGram(), DraftModel(model=l2_close)]),
    ):
        with Engine(l2, drafter, **sizes) as engine:
            alone = [engine.generate(*pair) for pair in zip(prompts(), params, strict=True)]
            batch = engine.generate(prompts(), params)
            assert_same(batch, alone, drafter)
            counts = [(a.metrics.drafted_tokens, a.metrics.accepted_tokens) for a in alone]
            assert counts == [(b.metrics.drafted_tokens, b.metrics.accepted_tokens) for b in batch]
            assert sum(drafted for drafted, _ in counts) > 0


@pytest.mark.parametrize("make", [lambda: Merge([Counting(), NGram()]), lambda: "suffix"])
def test_the_law_stays(make_bigram: Callable[..., Path], make: Callable[[], Any]) -> None:
    # Two tokens of a known law, drafted by guesses that are often wrong.
    logits = np.random.default_rng(3).normal(0, 1.0, (16, 16)).astype(np.float32)
    model = make_bigram(logits)
    count = 4000
    sizes = {"max_model_len": 32, "max_batch_size": 50, "threads": 1, "max_num_batched_tokens": 512}
    options = {"verification": "rejection", "num_speculative_tokens": 3, **sizes}
    drafter = make()
    if isinstance(drafter, Merge):
        drafter.parts[0].vocab = 16
    prompt = [3, 4, 5, 3, 4, 6, 3, 4]
    with Engine(model, drafter, **options) as engine:
        params = [SamplingParams(max_tokens=3, temperature=1.0, seed=s) for s in range(count)]
        given = engine.generate([prompt] * count, params)
    assert sum(one.metrics.drafted_tokens for one in given) > count / 5
    law = np.exp(logits - logits.max(1, keepdims=True))
    law /= law.sum(1, keepdims=True)
    pairs = np.zeros((16, 16))
    for one in given:
        pairs[one.token_ids[1], one.token_ids[2]] += 1
    start = law[4] @ law
    expected = count * start[:, None] * law
    seen = expected > 5
    chi = ((pairs - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi < seen.sum() + 5 * np.sqrt(2 * seen.sum())


# Suffix decoding.


def test_responses_help_later_requests(counter: Path) -> None:
    with Engine(counter, "suffix", **SMALL) as engine:
        first = engine.generate([7, 1, 100], greedy(40))
        assert engine.memory.drafter_index > 0
        second = engine.generate([9, 90, 105], greedy(30))
    assert first.token_ids == list(range(101, 141))
    assert second.token_ids == list(range(106, 136))
    assert first.metrics.accepted_tokens == 0
    assert second.metrics.acceptance_length > 4
    with Engine(counter, Suffix(suffix_decoding_max_cached_requests=0), **SMALL) as engine:
        engine.generate([7, 1, 100], greedy(40))
        alone = engine.generate([9, 90, 105], greedy(30))
        assert engine.memory.drafter_index == 0
    assert alone.metrics.accepted_tokens == 0


def test_cache_is_bounded(counter: Path) -> None:
    cache = SuffixCache(max_requests=3, max_tokens=100)
    with Engine(counter, Suffix(cache=cache), **SMALL) as engine:
        for start in range(0, 240, 20):
            engine.generate([start], greedy(30))
            assert cache.requests <= 3
            assert cache.tokens <= 100
            assert cache.bytes <= cache.max_bytes
            cache.check_invariants()
        assert engine.memory.drafter_index == cache.bytes
    assert cache.requests == 3


def test_engines_share_a_cache(counter: Path) -> None:
    cache = SuffixCache()
    failures: list[BaseException] = []

    def work(engine: Engine, step: int) -> None:
        try:
            for i in range(15):
                start = (step * 16 + i * 3) % 200
                got = engine.generate([start], greedy(24)).token_ids
                assert got == list(range(start + 1, start + 25))
        except BaseException as error:
            failures.append(error)

    with (
        Engine(counter, Suffix(cache=cache), **SMALL) as one,
        Engine(counter, Suffix(cache=cache), **SMALL) as other,
    ):
        threads = [
            threading.Thread(target=work, args=(engine, step))
            for step, engine in enumerate((one, other, one, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        after = other.generate([40], greedy(24)).metrics
    assert not failures
    cache.check_invariants()
    assert cache.requests == 61
    assert after.acceptance_length > 4


def test_a_cache_is_of_one_vocabulary(counter: Path, l2: Path) -> None:
    cache = SuffixCache()
    with Engine(counter, Suffix(cache=cache), **SMALL):
        pass
    with pytest.raises(InvalidArgumentError, match=r"\[suffix cache\].*264.*256"):
        Engine(l2, Suffix(cache=cache), **SMALL)


def test_suffix_arguments() -> None:
    name = "suffix_decoding_"
    for option, values in {
        "max_tree_depth": (0, 1.5, True, 5000),
        "max_cached_requests": (-1, 0.5, True, None),
        "max_cached_tokens": (-1, 2**31, "9"),
        "max_spec_factor": (-0.1, float("nan"), float("inf"), "2", True),
        "max_spec_offset": (float("inf"), None),
        "min_token_prob": (-0.1, 1.1, float("nan")),
        "use_tree_spec": (1, None, "yes"),
    }.items():
        for value in values:
            with pytest.raises(InvalidArgumentError, match=rf"\[{name}{option}\]"):
                Suffix(**{name + option: value})
    with pytest.raises(InvalidArgumentError, match=r"\[cache\]"):
        Suffix(cache={})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"\[cache\].*12.*24"):
        Suffix(cache=SuffixCache(), suffix_decoding_max_tree_depth=12)
    with pytest.raises(InvalidArgumentError, match="limits of its own"):
        Suffix(cache=SuffixCache(), suffix_decoding_max_cached_tokens=5)
    with pytest.raises(TypeError):
        Suffix(max_depth=3)  # type: ignore[call-arg]


def test_never_more_than_asked_for(counter: Path) -> None:
    prompt = [*range(50), *range(5)]
    for drafter in ("suffix", Suffix(suffix_decoding_use_tree_spec=True), NGram(num_candidates=4)):
        with Engine(counter, drafter, num_speculative_tokens=4, **SMALL) as engine:
            metrics = engine.generate(prompt, greedy(30)).metrics
        assert 0 < metrics.drafted_tokens <= 4 * metrics.rounds
        assert metrics.accepted_tokens > 15


# N-gram trees.


def test_candidates_of_a_tree(counter: Path) -> None:
    # After 10 11 came first 12, which is right, and then twice something else.
    prompt = [10, 11, 12, 13, 14, 10, 11, 80, 81, 10, 11, 90, 91, 9]
    accepted = {}
    for candidates in (1, 2, 3):
        drafter = NGram(prompt_lookup_min=2, num_candidates=candidates)
        with Engine(counter, drafter, num_speculative_tokens=8, **SMALL) as engine:
            accepted[candidates] = engine.generate(prompt, greedy(6)).metrics.accepted_tokens
    # Behind 10 11 the draft has 90, then 80 as well, then 12. 13 and 14 are found in any case.
    assert accepted == {1: 2, 2: 2, 3: 3}


# Merged drafts.


def test_sources(l2: Path, l2_close: Path) -> None:
    with Engine(l2, **SMALL) as engine:
        plain = engine.generate(prompts()[0], greedy(80))
    texts = known([plain])
    drafter = Merge([AlwaysWrong(texts, 264), Oracle(texts, 264), NGram()])
    with Engine(l2, drafter, num_speculative_tokens=4, **SMALL) as engine:
        output = engine.generate(prompts()[0], greedy(80))
    metrics = output.metrics
    assert output.token_ids == plain.token_ids
    assert list(metrics.sources) == ["AlwaysWrong", "Oracle", "ngram"]
    wrong, right = metrics.sources["AlwaysWrong"], metrics.sources["Oracle"]
    assert wrong.accepted_tokens == 0 < wrong.drafted_tokens
    assert wrong.acceptance_rate == 0.0
    assert right.accepted_tokens == metrics.accepted_tokens
    assert wrong.drafted_tokens < right.drafted_tokens / 2  # it soon has no place
    assert metrics.acceptance_length > 3.5
    with Engine(l2, NGram(), **SMALL) as engine:
        alone = engine.generate(prompts()[0], greedy(80)).metrics
    assert list(alone.sources) == ["ngram"]
    assert alone.sources["ngram"].drafted_tokens == alone.drafted_tokens
    assert alone.sources["ngram"].accepted_tokens == alone.accepted_tokens


def test_draft_model_rests_while_the_lookup_is_sure(counter: Path) -> None:
    drafter = Merge([DraftModel(model=counter), NGram()])
    with Engine(counter, drafter, num_speculative_tokens=6, **SMALL) as engine:
        sure = engine.generate([*range(200), 0], greedy(150)).metrics
        lost = engine.generate([0], greedy(60)).metrics
    assert list(sure.sources) == ["draft_model", "ngram"]
    assert sure.sources["draft_model"].drafted_tokens == 0
    assert sure.sources["ngram"].acceptance_rate == 1.0
    assert lost.sources["ngram"].drafted_tokens == 0
    assert lost.sources["draft_model"].acceptance_rate == 1.0
    assert lost.acceptance_length > 6


def test_faulty_part_ends_its_own_request(counter: Path) -> None:
    class Moody(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            if tokens[0] == 66:
                raise RuntimeError("out of ideas")
            return super().propose(tokens, budget)

    class Sampling(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            tree = DraftTree.chain([(tokens[-1] + 1) % 256])
            tree.set_distribution(-1, [1.0 / 256] * 256)
            return tree

    with Engine(counter, Merge([NGram(), Moody()]), **SMALL) as engine:
        with pytest.raises(SpecrtError, match=r"Moody: .*out of ideas") as caught:
            engine.generate([[66, 1], [67, 1]], greedy(20))
        assert caught.value.outputs[0] is None  # type: ignore[attr-defined]
        assert caught.value.outputs[1].token_ids == list(range(2, 22))  # type: ignore[attr-defined]
    with (
        Engine(counter, Merge([NGram(), Sampling()]), **SMALL) as engine,
        pytest.raises(SpecrtError, match=r"Sampling: .*picked"),
    ):
        engine.generate([1], greedy(5))


def test_merge_arguments(counter: Path) -> None:
    for parts in ([], [None], [3], "ngram", NGram(), [Merge(["ngram"])], ["ngramm"], [NGram]):
        with pytest.raises(InvalidArgumentError):
            Merge(parts)
    with pytest.raises(InvalidArgumentError, match="at most one model or head"):
        Merge([DraftModel(model=counter), DraftModel(model=counter)])
    with pytest.raises(InvalidArgumentError, match=r"\[num_speculative_tokens\]"):
        Merge(["ngram"], num_speculative_tokens=0)
    assert Merge(["ngram", "suffix"]).parts == (NGram(), Suffix())
    plan = specrt.plan(counter, Merge(["ngram", DraftModel(model=counter)]), max_model_len=64)
    assert plan.drafter_weights == plan.target_weights


# The brake.


def test_policy(counter: Path) -> None:
    for policy in ("ema", "", None, 3, True):
        with pytest.raises(InvalidArgumentError, match=r"\[policy\] expected 'goodput', 'brake'"):
            Engine(counter, "ngram", policy=policy, **SMALL)
    with Engine(counter, "ngram", **SMALL) as engine:
        assert engine.policy == "brake"


@pytest.mark.usefixtures("own_default_policy")
def test_default_policy(counter: Path) -> None:
    with Engine(counter, "ngram", **SMALL) as engine:
        assert engine.policy == "goodput"
        assert "pass 1 " in str(engine.cost_model)  # measured
        assert engine.generate([5, 6], greedy(20)).token_ids == list(range(7, 27))


def test_drafts_that_fail_stop(counter: Path) -> None:
    # A guess that costs half a pass and is never right.
    class Dear(Counting):
        step_cost = 0.5

    options = {**SMALL, "cpu_isa": "scalar"}
    drafted = {}
    for policy in ("brake", "fixed"):
        for kind in (Counting, Dear):
            with Engine(counter, kind(step=2), policy=policy, **options) as engine:
                outputs = engine.generate([[5], [6], [7]], greedy(200))
                alone = engine.generate([5], greedy(200))
            assert [one.token_ids[:3] for one in outputs] == [[6, 7, 8], [7, 8, 9], [8, 9, 10]]
            counts = {one.metrics.drafted_tokens for one in (*outputs, alone)}
            assert len(counts) == 1  # each by its own rounds
            drafted[policy, kind] = counts.pop()
    assert drafted["fixed", Counting] == drafted["fixed", Dear] > 700
    assert drafted["brake", Dear] <= drafted["brake", Counting] < 40


def test_drafts_come_back_once_they_are_right(counter: Path) -> None:
    class Turning(Counting):
        def propose(self, tokens: list[int], budget: int) -> DraftTree | None:
            self.step = 2 if len(tokens) < 60 else 1
            return super().propose(tokens, budget)

    with Engine(counter, Turning(), **SMALL) as engine:
        metrics = engine.generate([0], greedy(240)).metrics
    assert metrics.rounds < 130
    with Engine(counter, Turning(), policy="fixed", **SMALL) as engine:
        fixed = engine.generate([0], greedy(240)).metrics
    assert metrics.drafted_tokens < fixed.drafted_tokens


def test_step_cost_is_checked(counter: Path) -> None:
    for cost in (-1.0, float("nan"), "1", None, True, 10**400):
        drafter = Counting()
        drafter.step_cost = cost  # type: ignore[assignment]
        with pytest.raises(InvalidArgumentError, match=r"\[step_cost\]"):
            Engine(counter, drafter, **SMALL)


def test_lookups_on_the_demo_model(demo_bf16: Path) -> None:
    text = (
        "The harbor is quiet this morning. The fishing boats leave before dawn, and only the old "
        "ferry remains at the pier. A few gulls circle over the water, waiting for the boats to "
        "return."
    )
    ask = {"role": "user", "content": f"Edit this paragraph and return it:\n\n{text}"}
    sizes = {"max_model_len": 256, "max_batch_size": 1, "tokenizer": demo_model_path()}
    answers = set()
    for drafter in (None, "ngram", "suffix"):
        with Engine(demo_bf16, drafter, **sizes) as engine:
            output = engine.chat([ask], greedy(60))
        answers.add(output.text)
        if drafter is not None:
            assert output.metrics.acceptance_length >= 4
    assert len(answers) == 1
