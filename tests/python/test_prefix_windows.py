"""Prefix reuse where layers have sliding windows, and where a draft model has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import Branching, HalfRight, Tally, assert_same, greedy, known
from reference_sampler import target_logits
from test_prefix import OPTIONS, Blocks, alike, cached, counts, mixed

import specrt
from specrt import Engine, RequestOutput, SamplingParams
from specrt.drafters import DraftModel, NGram

FAMILIES = ("mistral", "gemma2", "gemma3_text")
V = 128


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_family(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def plain_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without windows, and without a clue."""
    return tiny.tiny_family(tmp_path_factory.mktemp("llama") / "model", "llama", seed=5)


def drafters(model: Path, plain_draft: Path, outputs: list[RequestOutput]) -> list[Any]:
    texts = known(outputs)
    return [
        None,
        HalfRight(texts, V),
        Branching(texts, V),
        NGram(prompt_lookup_min=1),
        DraftModel(model=model),
        DraftModel(model=plain_draft),
    ]


@pytest.mark.parametrize("block", [1, 4, 16])
def test_turns_by_hand(model: Path, plain_draft: Path, block: int) -> None:
    draw = np.random.default_rng(3)
    prompt = (draw.integers(0, V, 6).tolist() * 8)[:41]
    with Engine(model, enable_prefix_caching=False, **OPTIONS) as engine:
        cold = engine.generate(prompt, greedy(24))
        turn = [*prompt, *cold.token_ids, 5, 6, 7]
        next_turn = engine.generate(turn, greedy(24))
    # Greedy by transformers, in one pass over the whole.
    best = target_logits(model, [*turn, *next_turn.token_ids]).argmax(-1)
    assert best[40:64].tolist() == cold.token_ids
    assert best[len(turn) - 1 : -1].tolist() == next_turn.token_ids
    for drafter in drafters(model, plain_draft, [cold, next_turn]):
        options = {**OPTIONS, "block_size": block, "check_invariants": True}
        with Engine(model, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            first = engine.generate(prompt, greedy(24))
            again = engine.generate(prompt, greedy(24))
            later = engine.generate(turn, greedy(24))
            assert engine._decoder.free_kv_tokens == free
        assert_same([first, again, later], [cold, cold, next_turn], (drafter, block))
        assert cached([first, again, later]) == [0, 40 // block * block, 64 // block * block]
        assert counts([first]) == counts([again])


class Load:
    """Requests with shared beginnings, several outputs of some, and what is right for each."""

    def __init__(self, model: Path) -> None:
        self.prompts = alike(16, 0, V)
        self.params = [mixed(i, n=3 if i % 4 == 1 else 1) for i in range(16)]
        with Engine(model, enable_prefix_caching=False, **OPTIONS) as engine:
            self.expected = engine.generate(self.prompts, self.params)
        assert cached(self.expected) == [0] * 16

    def run(self, engine: Engine, order: list[int], what: Any) -> list[RequestOutput]:
        outputs = engine.generate([self.prompts[i] for i in order], [self.params[i] for i in order])
        assert_same(outputs, [self.expected[i] for i in order], what)
        return outputs


@pytest.fixture(scope="module")
def load(model: Path) -> Load:
    return Load(model)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_hits_by_hand_and_the_same_bytes(
    model: Path, plain_draft: Path, load: Load, block: int
) -> None:
    tally = Tally()
    order = np.random.default_rng(block).permutation(16).tolist()
    for drafter in drafters(model, plain_draft, load.expected):
        # Room for everything, so nothing is ever forgotten.
        options = {**OPTIONS, "max_batch_size": 60, "block_size": block, "check_invariants": True}
        with Engine(model, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            blocks = Blocks(block)
            for row in [*range(16), *order]:
                (output,) = load.run(engine, [row], (drafter, row))
                assert output.metrics.cached_prompt_tokens == blocks.hit(load.prompts[row]), row
                if len(output.outputs) > 1:  # the others find the prompt of the first
                    blocks.keep(output)
                    others = [one.metrics.cached_prompt_tokens for one in output.outputs[1:]]
                    assert others == [(len(load.prompts[row]) - 1) // block * block] * 2
                for one in output.outputs:
                    text = [*output.prompt_token_ids, *one.token_ids][:-1]
                    for end in range(block, len(text) + 1, block):
                        blocks.seen.add(tuple(text[:end]))
                tally.add([output])
            assert engine._decoder.free_kv_tokens == free
    assert 1000 < tally.accepted < tally.drafted - 1000


@pytest.mark.parametrize("rows", [512, 17])
def test_batches_in_any_order(model: Path, plain_draft: Path, load: Load, rows: int) -> None:
    draw = np.random.default_rng(1)
    for drafter in drafters(model, plain_draft, load.expected):
        options = {**OPTIONS, "max_num_batched_tokens": rows, "check_invariants": True}
        with Engine(model, drafter, **options) as engine:
            free = engine._decoder.free_kv_tokens
            hits = 0
            for turn in range(3):
                order = draw.permutation(16).tolist() if turn else list(range(16))
                hits += sum(cached(load.run(engine, order, (drafter, turn))))
            assert hits > 16 * 3 * 10
            assert engine._decoder.free_kv_tokens == free


@pytest.mark.parametrize("block", [1, 4, 16])
def test_eviction_under_pressure(model: Path, plain_draft: Path, load: Load, block: int) -> None:
    # One request at full length fits, and next to nothing beside it.
    hits = misses = 0
    for drafter in drafters(model, plain_draft, load.expected):
        sizes = {"block_size": block, "max_model_len": 80, "max_num_batched_tokens": 40}
        draft = drafter if isinstance(drafter, DraftModel) else None
        plan = specrt.plan(model, draft, max_batch_size=1, **sizes)
        options = {**OPTIONS, **sizes, "kv_cache_bytes": plan.kv_cache + plan.kv_cache // 8}
        with Engine(model, drafter, check_invariants=True, **options) as engine:
            free = engine._decoder.free_kv_tokens
            for row in [*range(16), *range(15, -1, -1)]:
                (output,) = load.run(engine, [row], (drafter, row))
                hits += output.metrics.cached_prompt_tokens > 0
                misses += output.metrics.cached_prompt_tokens == 0
            load.run(engine, list(range(16)), drafter)
            assert engine._decoder.free_kv_tokens == free
    assert hits > 20
    assert misses > 20


def test_a_hit_needs_only_the_window(tmp_path: Path) -> None:
    # 32 blocks of 4 are one sequence at full length. With a window of 8 the pool has fewer, and a
    # long text has lost its beginning by the time it ends; its end is enough for the next turn.
    model = tiny.tiny_family(tmp_path / "mistral", "mistral")
    draw = np.random.default_rng(4)
    prompt = draw.integers(0, V, 90).tolist()
    sizes = {"block_size": 4, "max_batch_size": 1, "max_num_batched_tokens": 8}
    options = {**OPTIONS, **sizes, "check_invariants": True}
    with Engine(model, **options) as engine:
        assert engine._decoder.free_kv_tokens == (8 + 8 + 4) // 4 * 4
        first = engine.generate(prompt, greedy(10))
        turn = [*prompt, *first.token_ids, 1, 2, 3]
        later = engine.generate(turn, greedy(10))
        start = engine.generate(prompt[:30], greedy(10))
    assert cached([first, later, start]) == [0, 96, 0]
    with Engine(model, enable_prefix_caching=False, **OPTIONS) as engine:
        wanted = [engine.generate(one, greedy(10)) for one in (prompt, turn, prompt[:30])]
    assert_same([first, later, start], wanted, "window")


def test_bytes_beyond_all_sequences_keep_more(model: Path, l2: Path, plain_draft: Path) -> None:
    draw = np.random.default_rng(7)
    for path, draft in ((model, None), (model, plain_draft), (l2, None)):
        sizes = {"max_model_len": 64, "max_batch_size": 1, "max_num_batched_tokens": 32}
        prompts = [draw.integers(97, 123, 50).tolist() for _ in range(9)]
        least = specrt.plan(path, draft, **sizes)
        budget = 12 * least.kv_cache
        found: dict[bool, list[int]] = {}
        for extra in (False, True):
            options = {**sizes, **({"kv_cache_bytes": budget} if extra else {})}
            drafter = None if draft is None else DraftModel(model=draft)
            with Engine(path, drafter, threads=1, check_invariants=True, **options) as engine:
                assert engine.memory == specrt.plan(path, drafter, **options)
                free = engine._decoder.free_kv_tokens
                outputs = [engine.generate(prompt, greedy(8)) for prompt in [*prompts, *prompts]]
                assert engine._decoder.free_kv_tokens == free
                assert_same(outputs[9:], outputs[:9], (path, extra))
                found[extra] = cached(outputs)
                if extra:
                    block = 16 * least.kv_cache // 64
                    assert budget - block < engine.memory.kv_cache <= budget
                    assert engine.memory.kv_cache_tokens >= 9 * 64
        assert found == {False: [0] * 18, True: [0] * 9 + [48] * 9}
        # Nobody would use them without prefix caching.
        off: dict[str, Any] = {**sizes, "kv_cache_bytes": budget, "enable_prefix_caching": False}
        with Engine(path, draft, threads=1, **off) as engine:
            assert engine.memory == specrt.plan(path, draft, **off)
            assert engine.memory.kv_cache == least.kv_cache


# Drafters after a hit.


def rounds(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The tokens of each round."""
    return [list(one.token_ids) for one in engine.stream(prompt, params)]


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_a_draft_model_is_as_good_after_a_hit(family: str, tmp_path: Path) -> None:
    """What the target finds in its cache, the drafter has to have in its own, or compute.

    Memory that holds nothing is NaN here: a slot that was taken for filled would show.
    """
    from safetensors.numpy import load_file

    target = tiny.tiny_family(tmp_path / "target", family)
    tensors = load_file(target / "model.safetensors")
    noise = np.random.default_rng(3)
    for name in sorted(tensors):
        if name.endswith("proj.weight"):
            spread = 0.1 * tensors[name].std()
            tensors[name] += noise.normal(0, spread, tensors[name].shape).astype(np.float32)
    close = tmp_path / "close"
    tiny.write_checkpoint(close, json.loads((target / "config.json").read_text()), tensors)
    draw = np.random.default_rng(6)
    prompt = (draw.integers(0, V, 9).tolist() * 12)[:64]
    for params in (greedy(40), greedy(40, temperature=1.0, seed=4)):
        for block in (1, 4, 16):
            for draft in (target, close):
                options = {**OPTIONS, "block_size": block, "check_invariants": True}
                drafter = DraftModel(model=draft)
                with Engine(target, drafter, enable_prefix_caching=False, **options) as engine:
                    cold = rounds(engine, prompt, params)
                with Engine(target, drafter, **options) as engine:
                    for turn in range(3):
                        assert rounds(engine, prompt, params) == cold, (block, draft, turn)
                    longer = engine.generate([*prompt, *prompt[:21]], params)
                    again = engine.generate([*prompt, *prompt[:21]], params)
                # Of the longer prompt the end is its own, all but what chance makes alike.
                assert 64 // block * block <= cached([longer])[0] < 80
                assert cached([again]) == [84 // block * block]
                assert_same([again], [longer], (block, draft))
                assert counts([again]) == counts([longer])
                accepted = sum(len(one) - 1 for one in cold)
                assert accepted > (20 if draft == target else 3)


def test_windowed_draft_model_under_another_target(l2: Path, tmp_path: Path) -> None:
    draft = tiny.tiny_family(tmp_path / "draft", "mistral", vocab_size=264, seed=1)
    prompt = (list(range(97, 105)) * 8)[:60]
    with Engine(l2, DraftModel(model=draft), check_invariants=True, **OPTIONS) as engine:
        outputs = [engine.generate(prompt, greedy(40)) for _ in range(3)]
    assert cached(outputs) == [0, 48, 48]
    assert_same(outputs, outputs[:1] * 3, "windowed draft model")
    assert counts(outputs) == counts(outputs[:1]) * 3
