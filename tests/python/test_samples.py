"""Several outputs of one prompt, and log-probabilities of the prompt itself."""

from __future__ import annotations

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
from reference_sampler import assert_law, softmax, target_logits

import specrt
from specrt import Engine, InvalidArgumentError, RequestOutput, SamplingParams, SpecrtError
from specrt.drafters import DraftModel, NGram

V = 264
OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_batch_size": 8, "threads": 1}
PROMPT = (list(range(97, 110)) * 5)[:50]
SAMPLED: dict[str, Any] = {"max_tokens": 20, "seed": 5, "temperature": 1.0, "logprobs": 1}


def generate(path: Path, drafter: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    with Engine(path, drafter, check_invariants=True, **{**OPTIONS, **options}) as engine:
        free = engine._decoder.free_kv_tokens
        output = engine.generate(PROMPT, params)
        assert engine._decoder.free_kv_tokens == free
        return output


def drafters(path: Path, outputs: list[RequestOutput]) -> list[Any]:
    texts = known(outputs)
    return [
        None,
        Oracle(texts, 256),
        HalfRight(texts, 256),
        AlwaysWrong(texts, 256),
        Branching(texts, 256),
        NGram(prompt_lookup_min=1),
        DraftModel(model=path),
    ]


# n.


def test_outputs_of_one_prompt(l2: Path) -> None:
    output = generate(l2, None, SamplingParams(n=5, **SAMPLED))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 5
    first = output.outputs[0]
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "metrics"):
        assert getattr(output, name) is getattr(first, name)
    assert output.seed == 5
    for one in output.outputs:
        assert len(one.token_ids) == len(one.logprobs) == 20
        assert one.finish_reason == "length"
    # An n of one is a list of one; greedy samples are all the same.
    alone = generate(l2, None, SamplingParams(**SAMPLED))
    assert len(alone.outputs) == 1
    assert alone.token_ids == output.token_ids
    same = generate(l2, "ngram", greedy(20, n=3))
    assert same.outputs[0].token_ids == same.outputs[1].token_ids == same.outputs[2].token_ids


def test_a_sample_is_itself_whatever_n_drafter_and_batch(l2: Path) -> None:
    expected = generate(l2, None, SamplingParams(n=5, **SAMPLED))
    tally = Tally()
    for drafter in drafters(l2, [expected]):
        for n, gamma, options in (
            (1, 4, {}),
            (3, 1, {"max_batch_size": 1}),
            (5, 4, {}),
            (5, 16, {"max_batch_size": 2, "block_size": 4}),
            (5, 4, {"enable_prefix_caching": False}),
            (5, 3, {"max_num_batched_tokens": 11}),
        ):
            output = generate(
                l2,
                drafter,
                SamplingParams(n=n, **SAMPLED),
                num_speculative_tokens=None if drafter is None else gamma,
                **options,
            )
            tally.add([output])
            for one, wanted in zip(output.outputs, expected.outputs, strict=False):
                assert one.token_ids == wanted.token_ids, (drafter, n, options, one.index)
                assert one.text == wanted.text
                assert one.logprobs == wanted.logprobs
    tally.assert_mixed()


@pytest.mark.parametrize("block", [1, 4, 16])
def test_samples_share_the_blocks_of_the_prompt(l2: Path, block: int) -> None:
    for drafter in (None, "ngram", DraftModel(model=l2)):
        # Whole blocks, less the one that holds the prompt's last token.
        shared = (len(PROMPT) - 1) // block * block
        for rows in (512, 11):
            output = generate(
                l2,
                drafter,
                SamplingParams(n=4, **SAMPLED),
                block_size=block,
                max_num_batched_tokens=rows,
            )
            cached = [one.metrics.cached_prompt_tokens for one in output.outputs]
            assert cached == [0, shared, shared, shared]
            assert all(one.metrics.prompt_tokens == len(PROMPT) for one in output.outputs)
    off = generate(l2, None, SamplingParams(n=4, **SAMPLED), enable_prefix_caching=False)
    assert [one.metrics.cached_prompt_tokens for one in off.outputs] == [0] * 4
    # A prompt that fills no block before its last token has nothing to share.
    with Engine(l2, **OPTIONS) as engine:
        short = engine.generate(PROMPT[:16], SamplingParams(n=2, **SAMPLED))
    assert [one.metrics.cached_prompt_tokens for one in short.outputs] == [0, 0]


def test_samples_beside_other_requests(l2: Path) -> None:
    prompts = [PROMPT, PROMPT[:20], [1], PROMPT]
    params = [
        SamplingParams(n=3, **SAMPLED),
        SamplingParams(n=1, **{**SAMPLED, "seed": 9}),
        SamplingParams(n=4, **{**SAMPLED, "max_tokens": 3}),
        SamplingParams(n=2, **{**SAMPLED, "temperature": 2.0, "repetition_penalty": 1.2}),
    ]
    with Engine(l2, **OPTIONS) as engine:
        expected = [engine.generate(p, one) for p, one in zip(prompts, params, strict=True)]
    for size in (1, 3, 8):
        for drafter in (None, NGram(prompt_lookup_min=1), DraftModel(model=l2)):
            options = {**OPTIONS, "max_batch_size": size, "check_invariants": True}
            with Engine(l2, drafter, **options) as engine:
                assert_same(engine.generate(prompts, params), expected, (size, drafter))
                assert engine._decoder.idle


def test_samples_are_independent(make_bigram: Callable[..., Path]) -> None:
    logits = np.random.default_rng(4).normal(0, 1.2, (16, 16)).astype(np.float32)
    count = 2500
    options = {"max_model_len": 16, "max_batch_size": 256, "threads": 1}
    model = make_bigram(logits)
    with Engine(model, DraftModel(model=model), **options) as engine:
        outputs = engine.generate(
            [[0]] * count,
            [SamplingParams(n=3, max_tokens=2, seed=i, temperature=1.0) for i in range(count)],
        )
    law = softmax(logits)
    second = law[0] @ law
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for place, one in ((0, law[0]), (1, second)):
            pairs = np.zeros((16, 16))
            for output in outputs:
                samples = output.outputs
                pairs[samples[a].token_ids[place], samples[b].token_ids[place]] += 1
            assert_law(pairs, np.outer(one, one), (a, b, place))


def test_samples_that_end_or_fail(counter: Path, tmp_path: Path) -> None:
    with Engine(counter, Counting(), **OPTIONS) as engine:
        none = engine.generate([1], greedy(0, n=3))
        assert [one.token_ids for one in none.outputs] == [[], [], []]
        stops = engine.generate([60], greedy(30, n=3, stop="FG"))
        assert [one.text for one in stops.outputs] == ["=>?@ABCDE"] * 3
        assert [one.stop_reason for one in stops.outputs] == ["FG"] * 3
        with pytest.raises(InvalidArgumentError, match=r"\[n\]"):
            engine.stream([1], greedy(3, n=2))
        assert engine._decoder.idle
        # One that cannot go on: an error, and no other request is harmed.
        stuck = greedy(9, n=3, allowed_token_ids=[65], bad_words=["AA"])
        with pytest.raises(SpecrtError, match="every token masked") as caught:
            engine.generate([[1], [2]], [stuck, greedy(5)])
        assert caught.value.outputs[0] is None
        assert caught.value.outputs[1].token_ids == [3, 4, 5, 6, 7]
        assert engine._decoder.idle


# Log-probabilities of the prompt.


def same_rounds(one: RequestOutput, other: RequestOutput) -> None:
    for name in ("rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate_per_position"):
        assert getattr(one.metrics, name) == getattr(other.metrics, name), name


@pytest.mark.parametrize("k", [0, 3, V])
def test_prompt_logprobs_are_those_of_transformers(l2: Path, k: int) -> None:
    law = np.log(softmax(target_logits(l2, PROMPT)))
    output = generate(l2, None, greedy(4, prompt_logprobs=k))
    told = output.prompt_logprobs
    assert len(told) == len(PROMPT)
    assert told[0] is None
    for i, token in enumerate(PROMPT[1:]):
        step = told[i + 1]
        order = np.argsort(-law[i], kind="stable").tolist()
        assert next(iter(step)) == token
        assert step[token].rank == order.index(token) + 1
        assert step[token].decoded_token == chr(token)
        others = [one for one in order[:k] if one != token]
        assert len(step) == 1 + len(others)
        if k == 3:
            assert list(step)[1:] == others
        for one, value in step.items():
            assert value.logprob == pytest.approx(law[i, one], abs=1e-4)


def test_prompt_logprobs_change_nothing(l2: Path) -> None:
    for params in (greedy(24, logprobs=2), SamplingParams(**SAMPLED)):
        plain = generate(l2, None, params)
        told = None
        for drafter in drafters(l2, [plain]):
            for options in ({}, {"max_num_batched_tokens": 9}, {"block_size": 1}):
                without = generate(l2, drafter, params, **options)
                given = {**params.__dict__, "prompt_logprobs": 2}
                output = generate(l2, drafter, SamplingParams(**given), **options)
                assert output.token_ids == plain.token_ids
                assert output.logprobs == plain.logprobs
                assert without.prompt_logprobs is None
                same_rounds(output, without)
                # The same bits whatever drafts, and in prefills of any size.
                told = told or output.prompt_logprobs
                assert output.prompt_logprobs == told


def test_prompt_logprobs_take_nothing_from_the_cache(l2: Path) -> None:
    cached = (len(PROMPT) - 1) // 16 * 16
    for drafter in (None, "ngram", DraftModel(model=l2)):
        with Engine(l2, drafter, check_invariants=True, **OPTIONS) as engine:
            first = engine.generate(PROMPT, greedy(12))
            told = engine.generate(PROMPT, greedy(12, prompt_logprobs=1))
            again = engine.generate(PROMPT, greedy(12))
            samples = engine.generate(PROMPT, SamplingParams(n=3, prompt_logprobs=1, **SAMPLED))
        assert told.metrics.cached_prompt_tokens == 0
        assert again.metrics.cached_prompt_tokens == cached
        assert told.token_ids == first.token_ids == again.token_ids
        assert len(told.prompt_logprobs) == len(PROMPT)
        assert None not in told.prompt_logprobs[1:]
        same_rounds(told, first)
        same_rounds(again, first)
        # The first sample tells them; the others may share its blocks.
        assert samples.prompt_logprobs == told.prompt_logprobs
        hits = [one.metrics.cached_prompt_tokens for one in samples.outputs]
        assert hits == [0, cached, cached]


def test_prompt_logprobs_in_a_batch_and_a_stream(l2: Path) -> None:
    prompts = [PROMPT[: 1 + 7 * i] for i in range(7)]
    params = [greedy(6, prompt_logprobs=i if i % 2 else None) for i in range(7)]
    with Engine(l2, **OPTIONS) as engine:
        expected = [engine.generate(p, one) for p, one in zip(prompts, params, strict=True)]
    for rows in (512, 13):
        with Engine(l2, "ngram", max_num_batched_tokens=rows, **OPTIONS) as engine:
            assert_same(engine.generate(prompts, params), expected, rows)
            one = engine.generate([7], greedy(3, prompt_logprobs=5))
            assert one.prompt_logprobs == [None]
            stream = engine.stream(prompts[3], params[3])
            assert_same([finish(stream)], [expected[3]], "stream")
    # Where a text ends with its first token, or in the middle of a round.
    with Engine(l2, **OPTIONS) as engine:
        ids = expected[5].token_ids
        ended = engine.generate(prompts[5], greedy(6, prompt_logprobs=5, stop_token_ids=ids[:1]))
    assert ended.token_ids == ids[:1]
    assert ended.prompt_logprobs == expected[5].prompt_logprobs


def finish(stream: Any) -> specrt.RequestOutput:
    """A stream's return value."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("kv_cache_bytes", [None, 130_000])
def test_as_many_tokens_as_there_is_room_for(l2: Path, kv_cache_bytes: int | None) -> None:
    """max_tokens=None: to the end of the context, or of a KV cache that is smaller."""
    sizes: dict[str, Any] = {"max_model_len": 300, "block_size": 4, "threads": 1}
    sizes |= {"max_num_batched_tokens": 24, "max_batch_size": 2}
    with Engine(l2, "ngram", kv_cache_bytes=kv_cache_bytes, **sizes) as engine:
        room = min(300, engine.metrics().kv_cache_tokens + 1)
        assert (room < 300) == (kv_cache_bytes is not None)
        output = engine.generate([5, 6, 7], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.token_ids) == room - 3
        assert output.outputs[0].finish_reason == "length"
        if room < 300:
            with pytest.raises(specrt.CapacityError, match="kv_cache_bytes"):
                engine.generate([5, 6, 7], greedy(room - 2))
        # A prompt that leaves no room for a token is refused, not answered with none.
        with pytest.raises(SpecrtError, match=r"kv_cache_bytes|max_model_len"):
            engine.generate([5] * room, SamplingParams(max_tokens=None))
        assert len(engine.generate([5, 6], greedy(4)).token_ids) == 4
