"""Prefix reuse: what it finds is known by hand, and it changes nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    Branching,
    HalfRight,
    Tally,
    assert_same,
    greedy,
    known,
)

import specrt
from specrt import Engine, RequestOutput, SamplingParams
from specrt.drafters import DraftModel, NGram

OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "max_batch_size": 5,
    "threads": 1,
    "policy": "fixed",
}
COUNTS = ("rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate_per_position", "alpha")


def counts(outputs: Sequence[RequestOutput]) -> list[list[Any]]:
    """How the drafts of each output fared."""
    return [[getattr(one.metrics, name) for name in COUNTS] for one in outputs]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [one.metrics.cached_prompt_tokens for one in outputs]


class Blocks:
    """What a cache without pressure knows: whole blocks behind everything that came before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: set[tuple[int, ...]] = set()

    def hit(self, prompt: Sequence[int]) -> int:
        # The prompt's last token is always computed: its logits are wanted.
        length = 0
        while length + self.size < len(prompt) and (
            tuple(prompt[: length + self.size]) in self.seen
        ):
            length += self.size
        return length

    def keep(self, output: RequestOutput) -> None:
        # The last token has chosen nothing yet, so nothing is stored of it.
        text = [*output.prompt_token_ids, *output.token_ids][:-1]
        for end in range(self.size, len(text) + 1, self.size):
            self.seen.add(tuple(text[:end]))


def alike(count: int, low: int, high: int) -> list[list[int]]:
    """Prompts of tokens in [low, high), of which several begin alike."""
    draw = np.random.default_rng(12)
    phrase = (draw.integers(low, high, 7).tolist() * 8)[:48]
    other = (draw.integers(low, high, 5).tolist() * 8)[:37]
    starts = (phrase, other, phrase[:16], phrase[:33])
    return [[*starts[i % 4], *draw.integers(low, high, i % 7).tolist()] for i in range(count)]


def mixed(i: int, **options: Any) -> SamplingParams:
    """The i-th request's parameters."""
    return SamplingParams(
        max_tokens=12 + i % 9,
        seed=i % 3,
        temperature=(0.0, 1.0)[i % 2],
        repetition_penalty=(1.0, 1.2)[i % 5 == 0],
        logprobs=1 if i % 3 == 0 else None,
        **options,
    )


class Load:
    """Requests with shared beginnings, and what is right for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompts = alike(24, 97, 123)
        self.params = [mixed(i) for i in range(24)]
        with Engine(path, enable_prefix_caching=False, **OPTIONS) as engine:
            self.expected = engine.generate(self.prompts, self.params)
        self.texts = known(self.expected)
        assert cached(self.expected) == [0] * 24

    def drafters(self, close: Path) -> list[Any]:
        return [
            None,
            HalfRight(self.texts, 256),
            Branching(self.texts, 256),
            NGram(prompt_lookup_min=1),
            DraftModel(model=close),
        ]


@pytest.fixture(scope="module")
def load(l2: Path) -> Load:
    return Load(l2)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_hits_by_hand_and_the_same_bytes(load: Load, l2_close: Path, block: int) -> None:
    order = np.random.default_rng(block).permutation(24).tolist()
    tally = Tally()
    for drafter in load.drafters(l2_close):
        # Room for everything, so nothing is ever forgotten.
        options = {**OPTIONS, "max_batch_size": 60, "block_size": block, "check_invariants": True}
        with Engine(load.path, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            blocks = Blocks(block)
            for row in [*range(24), *order, 3, 3]:
                output = engine.generate(load.prompts[row], load.params[row])
                assert_same([output], [load.expected[row]], (drafter, row))
                assert output.metrics.cached_prompt_tokens == blocks.hit(load.prompts[row]), row
                blocks.keep(output)
                tally.add([output])
            assert engine._decoder.free_kv_tokens == free
    tally.assert_mixed()


def test_no_hits_where_it_is_off(load: Load, l2_close: Path) -> None:
    for drafter in load.drafters(l2_close):
        with Engine(load.path, drafter, enable_prefix_caching=False, **OPTIONS) as engine:
            for _ in range(2):
                outputs = engine.generate(load.prompts, load.params)
                assert_same(outputs, load.expected, drafter)
                assert cached(outputs) == [0] * 24


@pytest.mark.parametrize("rows", [512, 17])
def test_batches_in_any_order(load: Load, l2_close: Path, rows: int) -> None:
    draw = np.random.default_rng(1)
    for drafter in load.drafters(l2_close):
        options = {**OPTIONS, "max_num_batched_tokens": rows, "check_invariants": True}
        with Engine(load.path, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            hits = 0
            for block in range(4):
                order = draw.permutation(24).tolist() if block else list(range(24))
                outputs = engine.generate(
                    [load.prompts[i] for i in order], [load.params[i] for i in order]
                )
                assert_same(outputs, [load.expected[i] for i in order], (drafter, block))
                hits += sum(cached(outputs))
            assert hits > 24 * 4 * 10
            assert engine._decoder.free_kv_tokens == free


@pytest.mark.parametrize("block", [1, 4, 16])
def test_eviction_under_pressure(load: Load, l2_close: Path, block: int) -> None:
    # One request at full length fits, and next to nothing beside it.
    hits = misses = 0
    for drafter in load.drafters(l2_close):
        sizes = {"block_size": block, "max_model_len": 80, "max_num_batched_tokens": 40}
        draft = drafter if isinstance(drafter, DraftModel) else None
        plan = specrt.plan(load.path, draft, max_batch_size=1, **sizes)
        tight = plan.target_kv_cache + plan.drafter_kv_cache
        options = {**OPTIONS, **sizes, "kv_cache_bytes": tight + tight // 8}
        with Engine(load.path, drafter, check_invariants=True, **options) as engine:
            free = engine._decoder.free_kv_tokens
            for row in [*range(24), *range(23, -1, -1)]:
                output = engine.generate(load.prompts[row], load.params[row])
                assert_same([output], [load.expected[row]], (drafter, row))
                hits += output.metrics.cached_prompt_tokens > 0
                misses += output.metrics.cached_prompt_tokens == 0
            outputs = engine.generate(load.prompts, load.params)
            assert_same(outputs, load.expected, drafter)
            assert engine._decoder.free_kv_tokens == free
    assert hits > 40
    assert misses > 40


def test_eviction_begins_at_the_far_end(l2: Path) -> None:
    draw = np.random.default_rng(5)
    first, second = (draw.integers(97, 123, size).tolist() for size in (80, 60))
    # 32 blocks. The first leaves 22 full ones behind, the second takes 18, the others stay.
    with Engine(l2, **{**OPTIONS, "block_size": 4, "max_batch_size": 1}) as engine:
        assert engine._decoder.free_kv_tokens == 128
        outputs = [engine.generate(one, greedy(10)) for one in (first, second, first, first)]
    assert cached(outputs) == [0, 0, (32 - 18) * 4, 76]
    assert_same(outputs[2:], [outputs[0]] * 2, "after eviction")


# Drafters after a hit.


@pytest.mark.parametrize("block", [1, 4, 16])
def test_drafters_keep_their_acceptance(l2: Path, l2_close: Path, block: int) -> None:
    draw = np.random.default_rng(6)
    prompts = [(draw.integers(97, 123, 9).tolist() * 12)[:64] for _ in range(3)]
    for params in (greedy(40), greedy(40, temperature=1.0, seed=4)):
        for drafter in (
            DraftModel(model=l2_close),
            DraftModel(model=l2),
            NGram(prompt_lookup_min=1),
        ):
            options = {**OPTIONS, "block_size": block, "check_invariants": True}
            with Engine(l2, drafter, enable_prefix_caching=False, **options) as engine:
                cold = engine.generate(prompts, params)
            with Engine(l2, drafter, **options) as engine:
                first = engine.generate(prompts, params)
                again = [engine.generate(prompt, params) for prompt in prompts]
                batch = engine.generate(prompts, params)
            assert_same([*first, *again, *batch], cold * 3, drafter)
            assert counts(first) == counts(again) == counts(batch) == counts(cold)
            assert sum(one.metrics.accepted_tokens for one in cold) > 20
            wanted = [(64 - 1) // block * block] * 3
            assert cached(first) == [0] * 3
            assert cached(again) == cached(batch) == wanted
            assert wanted[0] >= 64 - 2 * max(block, 4) or block == 16


def test_drafters_keep_their_acceptance_on_part_of_a_prompt(l2: Path, l2_close: Path) -> None:
    # A long beginning that others had, and an end of one's own: the cold counts all the same.
    draw = np.random.default_rng(9)
    shared = (draw.integers(97, 123, 11).tolist() * 9)[:80]
    prompts = [[*shared, *draw.integers(97, 123, 3 + i).tolist()] for i in range(6)]
    params = greedy(30)
    for drafter in (DraftModel(model=l2_close), NGram(prompt_lookup_min=1)):
        with Engine(l2, drafter, enable_prefix_caching=False, **OPTIONS) as engine:
            cold = [engine.generate(prompt, params) for prompt in prompts]
        with Engine(l2, drafter, check_invariants=True, **OPTIONS) as engine:
            warm = [engine.generate(prompt, params) for prompt in prompts]
        assert_same(warm, cold, drafter)
        assert counts(warm) == counts(cold)
        assert cached(warm) == [0, *[80] * 5]


@pytest.mark.parametrize("block", [4, 16])
def test_next_turn_reuses_prompt_and_answer(l2: Path, l2_close: Path, block: int) -> None:
    turns = ["hello there, how are you today?", "and tomorrow?", "why is that so, do you think?"]
    hits: dict[str, list[int]] = {}
    texts: dict[str, list[list[int]]] = {}
    for name, drafter, reuse in (
        ("cold", None, False),
        ("plain", None, True),
        ("ngram", NGram(prompt_lookup_min=1), True),
        ("model", DraftModel(model=l2_close), True),
        ("self", DraftModel(model=l2), True),
    ):
        options = {**OPTIONS, "max_model_len": 400, "block_size": block}
        with Engine(l2, drafter, enable_prefix_caching=reuse, **options) as engine:
            prompt: list[int] = []
            hits[name], texts[name] = [], []
            for turn in turns:
                prompt = [*prompt, *turn.encode()]
                output = engine.generate(prompt, greedy(41))
                hits[name].append(output.metrics.cached_prompt_tokens)
                texts[name].append(output.token_ids)
                prompt += output.token_ids
    assert len({str(one) for one in texts.values()}) == 1
    assert hits["cold"] == [0, 0, 0]
    # All of the turns before but the answer's last token, in whole blocks.
    first = len(turns[0]) + 41
    second = first + len(turns[1]) + 41
    wanted = [0, (first - 1) // block * block, (second - 1) // block * block]
    assert hits["plain"] == hits["ngram"] == hits["model"] == hits["self"] == wanted


def test_answers_cut_by_a_stop_text(counter: Path) -> None:
    # The round in which the text ends goes on behind it; the next turn must not.
    from helpers import Counting

    options = {**OPTIONS, "block_size": 1, "check_invariants": True}
    with Engine(counter, Counting(), num_speculative_tokens=12, **options) as engine:
        cut = engine.generate([64], greedy(40, stop="E"))
        assert cut.text == "ABCD"
        prompt = [64, *cut.token_ids]
        for tail in ([], [70], [80, 81]):
            output = engine.generate([*prompt, *tail], greedy(9))
            last = [*prompt, *tail][-1]
            assert output.token_ids == list(range(last + 1, last + 10))
            assert output.metrics.cached_prompt_tokens <= len(prompt) + len(tail) - 1
            assert output.metrics.cached_prompt_tokens >= len(prompt) - 1


def test_sharing_with_one_that_runs(l2: Path, l2_close: Path) -> None:
    prompt = (list(range(97, 110)) * 4)[:45]
    params = greedy(60)
    for drafter in (None, NGram(prompt_lookup_min=1), DraftModel(model=l2_close)):
        options = {**OPTIONS, "block_size": 4, "check_invariants": True}
        with Engine(l2, drafter, enable_prefix_caching=False, **options) as engine:
            expected = engine.generate(prompt, params)
        with Engine(l2, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            stream = engine.stream(prompt, params)
            tokens = list(next(stream).token_ids)
            beside = engine.generate([prompt, prompt[:30]], params)
            assert cached(beside) == [44, 28]
            assert_same(beside[:1], [expected], drafter)
            tokens += [token for one in stream for token in one.token_ids]
            assert tokens == expected.token_ids
            # One that leaves while another shares its blocks.
            stream = engine.stream(prompt, params)
            next(stream)
            other = engine.stream(prompt, params)
            first = list(next(other).token_ids)
            stream.close()
            first += [token for one in other for token in one.token_ids]
            assert first == expected.token_ids
            assert engine._decoder.free_kv_tokens == free
            assert engine._decoder.idle


def test_many_requests_leak_nothing(l2: Path, l2_close: Path) -> None:
    draw = np.random.default_rng(2)
    starts = [draw.integers(97, 123, 40).tolist() for _ in range(4)]
    sizes = {"block_size": 4, "max_model_len": 80, "max_num_batched_tokens": 40}
    options: dict[str, Any] = {**OPTIONS, **sizes}
    options["kv_cache_bytes"] = specrt.plan(l2, l2_close, max_batch_size=2, **sizes).total // 2
    for drafter in (NGram(prompt_lookup_min=1), DraftModel(model=l2_close)):
        with Engine(l2, drafter, check_invariants=True, **options) as engine:
            free = engine._decoder.free_kv_tokens
            for i in range(120):
                start = starts[int(draw.integers(4))]
                prompt = [*start[: int(draw.integers(1, 41))], int(draw.integers(97, 123))]
                params = SamplingParams(
                    max_tokens=int(draw.integers(0, 30)), seed=i, temperature=i % 2,
                    n=1 + i % 3, stop_token_ids=[100, 120] if i % 4 == 0 else None,
                )  # fmt: skip
                if i % 5 == 4:
                    stream = engine.stream(prompt, greedy(20))
                    next(stream)
                    stream.close()
                else:
                    engine.generate([prompt, prompt[:3]], params)
                assert engine._decoder.free_kv_tokens == free
            assert engine.memory.drafter_index == 0
            warm = engine.generate(starts, greedy(20))
        with Engine(l2, enable_prefix_caching=False, **OPTIONS) as engine:
            assert_same(warm, engine.generate(starts, greedy(20)), drafter)
