"""Memory: known beforehand, never exceeded, given back; and engines that live long."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same, greedy

import specrt
from specrt import CapacityError, Engine, SamplingParams
from specrt.drafters import DraftModel

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 8, "threads": 1}


def test_request_that_can_never_fit(l2: Path) -> None:
    one_request = specrt.plan(l2, max_model_len=32, max_batch_size=1, block_size=16).target_kv_cache
    with Engine(
        l2, max_model_len=160, max_batch_size=4, kv_cache_bytes=one_request, threads=1
    ) as engine:
        room = engine.memory.kv_cache_tokens
        assert 16 <= room < 100
        for prompt, count in (([1] * 100, 5), ([1], 159)):
            message = rf"\[kv_cache_bytes\].*{min(len(prompt) + count, 160) - 1}.*{room}"
            with pytest.raises(CapacityError, match=message):
                engine.generate(prompt, greedy(count))
            with pytest.raises(CapacityError):
                engine.generate([[1], prompt], greedy(count))
            with pytest.raises(CapacityError):
                engine.stream(prompt, greedy(count))
        # As much as there is, exactly; several of them wait for one another.
        outputs = engine.generate([[1]] * 5, greedy(room))
        assert [len(one.token_ids) for one in outputs] == [room] * 5
        assert engine._decoder.free_kv_tokens == room


def test_cache_too_small_for_anything(l2: Path) -> None:
    with pytest.raises(CapacityError, match=r"\[kv_cache_bytes\] expected at least \d+.*got 1000"):
        Engine(l2, kv_cache_bytes=1000, **SMALL)
    with pytest.raises(CapacityError, match=r"\[kv_cache_bytes\]"):
        specrt.plan(l2, kv_cache_bytes=1000, max_model_len=160)


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_plan_is_what_the_engine_takes(l2: Path, l2_other: Path, drafter: str) -> None:
    given: Any = {"none": None, "ngram": "ngram", "model": l2_other}[drafter]
    for dtype in ("float32", "bfloat16", "int8", "int4", "w8a8"):
        for options in (
            {},
            {"max_model_len": 100, "max_batch_size": 3},
            {"max_model_len": 100, "kv_cache_bytes": 3_000_000},
            {"block_size": 7, "max_num_batched_tokens": 33, "max_model_len": 50},
            {"kv_cache_dtype": "int8", "max_model_len": 100},
            {"kv_cache_dtype": "bf16", "max_model_len": 600, "block_size": 5},
            {"kv_cache_dtype": "fp32", "max_model_len": 100, "kv_cache_bytes": 3_000_000},
        ):
            plan = specrt.plan(l2, given, dtype=dtype, **options)
            with Engine(l2, given, dtype=dtype, threads=1, **options) as engine:
                assert engine.memory == plan
                assert plan.total > plan.target_weights > 0
                engine.generate([[1] * 20] * 3, greedy(10))
                assert engine.memory == plan  # running takes no more
            if "kv_cache_bytes" in options:
                assert 0 < plan.kv_cache <= options["kv_cache_bytes"]
            assert (plan.drafter_kv_cache > 0) == (drafter == "model")
            assert (plan.drafter_weights > 0) == (drafter == "model")


def test_kv_cache_dtype_decides_its_size(l2: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 4}
    sizes = {
        name: specrt.plan(l2, kv_cache_dtype=name, **options).target_kv_cache
        for name in ("auto", "float32", "bfloat16", "int8")
    }
    assert sizes["auto"] == sizes["float32"] == 2 * sizes["bfloat16"]
    # A scale of four bytes for each head_dim = 16 values.
    assert sizes["int8"] * 32 == sizes["bfloat16"] * (16 + 4)
    assert specrt.plan(l2, dtype="bfloat16", **options).target_kv_cache == sizes["bfloat16"]
    for name, told in (("fp32", "float32"), ("bf16", "bfloat16"), ("int8", "int8")):
        with Engine(l2, kv_cache_dtype=name, **options) as engine:
            assert engine.kv_cache_dtype == told


def test_three_hundred_mixed_requests(l2: Path, l2_close: Path) -> None:
    draw = np.random.default_rng(8)
    options = {**SMALL, "kv_cache_bytes": 2_000_000, "check_invariants": True}
    with Engine(l2, DraftModel(model=l2_close), block_size=4, **options) as engine:
        free = engine._decoder.free_kv_tokens

        def one() -> tuple[list[int], SamplingParams]:
            prompt = draw.integers(0, 256, draw.integers(1, 60)).tolist()
            more: dict[str, Any] = [
                {},
                {"temperature": 1.0},
                {"temperature": 1.0, "stop": ["e", "\ufffd"]},
                {"stop_token_ids": draw.integers(0, 256, 30).tolist()},
                {"logprobs": 2, "top_p": 0.9, "temperature": 0.7},
            ][draw.integers(5)]
            count = int(draw.integers(0, 40))
            return prompt, SamplingParams(max_tokens=count, seed=int(draw.integers(9)), **more)

        for turn in range(60):
            batch = [one() for _ in range(4)]
            engine.generate([p for p, _ in batch], [s for _, s in batch])
            stream = engine.stream(*one())
            for _ in range(turn % 4):
                next(stream, None)
            stream.close()
        assert engine._decoder.free_kv_tokens == free
        last = [one() for _ in range(8)]
        outputs = engine.generate([p for p, _ in last], [s for _, s in last])
    with Engine(l2, DraftModel(model=l2_close), block_size=4, **options) as fresh:
        expected = fresh.generate([p for p, _ in last], [s for _, s in last])
    assert_same(outputs, expected, "last")
    for output, other in zip(outputs, expected, strict=True):
        assert output.metrics.drafted_tokens == other.metrics.drafted_tokens
        assert output.metrics.accepted_tokens == other.metrics.accepted_tokens


def test_fifty_engines_in_one_process(l2: Path, l2_close: Path) -> None:
    seen = set()
    threads = threading.active_count()
    for turn in range(50):
        engine = Engine(
            l2,
            DraftModel(model=l2_close),
            max_model_len=64,
            max_batch_size=1,
            threads=1 + turn % 2,
        )
        output = engine.generate([1, 2, 3], greedy(40))
        metrics = output.metrics
        seen.add((tuple(output.token_ids), metrics.drafted_tokens, metrics.accepted_tokens))
        if turn % 2:
            engine.close()
        del engine
    assert len(seen) == 1
    assert threading.active_count() == threads
