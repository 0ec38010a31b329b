"""Random schedules: whatever comes, goes and is preempted beside it, an output is its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from draft_heads import Head, write
from helpers import fingerprint, greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrt import Engine, SamplingParams, Speculation, StructuredOutputs
from specrt.delivery import Delivery
from specrt.drafters import DraftModel, Eagle, Merge, NGram, SelfDraft, Suffix
from specrt.handle import RequestHandle
from specrt.request import request_output

SHARED = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [
    [1], [2, 3], SHARED, [*SHARED, 1], [*SHARED, *SHARED], [*SHARED, 4, 4, 4, 4, 9, 9],
    [40, 41, 42, 43] * 4, [7] * 21, list(range(60, 90)),
]  # fmt: skip
PARAMS = [
    greedy(1),
    greedy(12),
    greedy(22, logprobs=1, prompt_logprobs=0),
    greedy(18, repetition_penalty=1.3, min_tokens=6, stop_token_ids=[3, 4, 5]),
    SamplingParams(max_tokens=20, temperature=0.9, seed=3),
    SamplingParams(max_tokens=12, temperature=1.1, seed=4, n=3, logprobs=0),
    SamplingParams(
        max_tokens=16, temperature=0.8, seed=5, frequency_penalty=0.6, stop=["e", "\x80"]
    ),
    SamplingParams(max_tokens=14, seed=6, structured_outputs=StructuredOutputs(regex="[a-f ]+x")),
]


MANNERS = [
    None,
    Speculation(drafter=False),
    Speculation(policy="off"),
    Speculation(policy="fixed"),
    Speculation(policy="fixed", num_speculative_tokens=1),
    Speculation(policy="ema_tiers"),
    Speculation(policy="goodput"),
    Speculation(policy="goodput", num_speculative_tokens=2, target_tpot_seconds=0.001),
    Speculation(policy="brake"),
]
"""How a request drafts, which may not show; the first three are all that no drafter allows."""

EXAMPLES = 43
"""For each of seven drafters."""


@dataclass
class Bench:
    """Engines under test, a plain one with room for all, and what it said."""

    engines: dict[str, Engine]
    plain: Engine
    said: dict[tuple[int, int], Any]
    seen: Counter[str]

    def expected(self, prompt: int, params: int) -> Any:
        key = (prompt, params)
        if key not in self.said:
            self.said[key] = self.plain.generate(PROMPTS[prompt], PARAMS[params])
        return self.said[key]


@pytest.fixture(scope="module")
def bench(l2_close: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = tmp_path_factory.mktemp("target")  # grammars need an end token
    l2 = tiny.byte_tokenizer(tiny.tiny_llama(path, vocab=264, eos_token_id=257))
    head = Head("eagle", vocab=264, seed=1)
    folder = tmp_path_factory.mktemp("head")
    write(folder, head.config(bias=False), head.stored())
    options: dict[str, Any] = {"threads": 1, "max_model_len": 64, "block_size": 4}
    with Engine(l2, **options) as plain:
        # Room for two of the longest, and for half of the places.
        tight: dict[str, Any] = {
            **options, "max_batch_size": 4, "max_num_batched_tokens": 24, "check_invariants": True,
        }  # fmt: skip
        drafters: dict[str, Any] = {
            "none": None,
            "ngram": NGram(prompt_lookup_min=1),
            "suffix": Suffix(),
            "model": DraftModel(model=l2_close, num_speculative_tokens=3),
            "self": SelfDraft(),
            "eagle": Eagle(folder, total_token=6, depth=2, top_k=2),
            "merged": Merge([NGram(), Suffix(), DraftModel(model=l2_close)]),
        }
        engines = {}
        for name, drafter in drafters.items():
            room = {"model": 78_000, "merged": 78_000, "self": 60_000, "eagle": 60_000}.get(name)
            engines[name] = Engine(l2, drafter, kv_cache_bytes=room or 40_000, **tight)
        yield Bench(engines, plain, {}, Counter())
        for engine in engines.values():
            engine.close()


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Submissions, some rounds, and cancellations, in any order."""
    submit = st.tuples(
        st.just("submit"),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, len(PARAMS) - 1),
        st.integers(-1, 1),
        st.integers(0, len(MANNERS) - 1),
    )
    step = st.tuples(st.just("step"), st.integers(1, 5))
    cancel = st.tuples(st.just("cancel"), st.integers(0, 9))
    return draw(
        st.lists(st.one_of(submit, submit, submit, step, step, cancel), min_size=10, max_size=24)
    )


@pytest.mark.parametrize("name", ["none", "ngram", "suffix", "model", "self", "eagle", "merged"])
def test_every_request_is_as_if_alone(bench: Bench, name: str) -> None:
    engine = bench.engines[name]
    scheduler = engine._scheduler
    decoder = engine._decoder
    assert decoder is not None
    free = decoder.free_kv_tokens
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schedules(), st.integers(0, 6))
    def run(schedule: list[tuple[Any, ...]], reserve: int) -> None:
        scheduler._reserve = reserve
        under_way: list[tuple[Any, RequestHandle]] = []
        for kind, *what in schedule:
            if kind == "submit":
                prompt, params, priority, manner = what
                how = MANNERS[manner % (3 if name == "none" else len(MANNERS))]
                asked = replace(PARAMS[params], speculation=how)
                samples = engine._requests([PROMPTS[prompt]], asked)[0]
                for one in samples:
                    one.priority = priority
                delivery = Delivery(len(samples))
                scheduler.submit(samples, delivery)
                handle = RequestHandle(scheduler, samples, delivery)
                under_way.append((bench.expected(prompt, params), handle))
            elif kind == "cancel" and what[0] < len(under_way):
                under_way[what[0]][1].cancel()
            elif kind == "step":
                for _ in range(what[0]):
                    scheduler.step()  # which checks the invariants of all caches
        rounds = 0
        while not all(handle.done for _, handle in under_way):
            rounds += 1
            assert rounds < 3000, "a request is stuck"
            scheduler.step()
        for expected, handle in under_way:
            output = request_output(handle._requests)
            streamed: list[list[int]] = [[] for _ in output.outputs]
            for increment in handle:
                streamed[increment.index] += increment.token_ids
            assert streamed == [one.token_ids for one in output.outputs]
            if all(one.finish_reason != "abort" for one in output.outputs):
                assert fingerprint(output) == fingerprint(expected)
                seen["finished"] += 1
            for one, whole in zip(output.outputs, expected.outputs, strict=True):
                assert one.token_ids == whole.token_ids[: len(one.token_ids)]
                seen["aborted"] += one.finish_reason == "abort"
                seen["accepted"] += one.metrics.accepted_tokens
                seen["cached"] += one.metrics.cached_prompt_tokens > 0
                seen["preemptions"] += one.metrics.preemptions
        assert decoder.idle
        assert decoder.free_kv_tokens == free
        assert not scheduler._running
        assert not scheduler._waiting
        assert not scheduler._left

    run()
    print(name, free, seen)
    assert seen["finished"] > 100, seen
    assert seen["aborted"] > 10, seen
    assert seen["preemptions"] > 30, seen
    assert seen["cached"] > 10, seen
    # A head that was never trained is right by chance alone.
    assert name in ("none", "eagle") or seen["accepted"] > 50, seen
