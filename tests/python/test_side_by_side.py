"""Requests side by side: passes that they share, preemption, observers, a short soak."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Counting, assert_same, greedy

import specrt
import specrt.observer
from specrt import Engine, InvalidArgumentError
from specrt.delivery import Delivery

SMALL: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 64, "threads": 1}


class Rounds(specrt.observer.Observer):
    """What became of each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[Any, Any]] = []

    def round(self, plan: Any, results: Any, seconds: float) -> None:
        self.rounds.append((list(plan), list(results)))
        assert seconds >= 0


def test_long_prompts_and_decoding_share_passes(counter: Path) -> None:
    """Decoding goes on beside a long prompt, with drafts; a short prompt does not wait for it."""
    options = {**SMALL, "max_num_batched_tokens": 32}
    with Engine(
        counter, Counting(), num_speculative_tokens=3, policy="fixed", max_model_len=1500, **options
    ) as engine:
        scheduler = engine._scheduler
        notes = scheduler.observer = Rounds()
        talks = engine._requests([[1]], greedy(300))[0]
        scheduler.submit(talks, Delivery(1))
        scheduler.step()
        scheduler.step()
        long = engine._requests([[9] * 1000], greedy(2))[0]
        short = engine._requests([[5] * 10], greedy(2))[0]
        scheduler.submit(long, Delivery(1))
        scheduler.submit(short, Delivery(1))
        before = len(notes.rounds)
        while not long[0].done:
            scheduler.step()
        rounds = notes.rounds[before:]
        # Four rows for who talks, nearly all others for the prompt: it takes this many rounds.
        assert 1000 // 32 < len(rounds) <= 1000 // 27 + 3
        for plan, results in rounds[1:]:
            assert dict(plan)[talks[0].id] == 3
            assert [len(one[1]) for one in results if one[0] == talks[0].id] == [4]
        first = next(row for row, (_, told) in enumerate(rounds) for one in told
                     if one[0] == short[0].id and one[1])  # fmt: skip
        assert first == 0
        assert talks[0].arrived <= talks[0].admitted <= talks[0].first_token
        assert long[0].first_token <= long[0].last_token <= long[0].finished


def test_preemption_can_be_switched_off(l2: Path) -> None:
    sizes: dict[str, Any] = {**SMALL, "max_model_len": 256, "block_size": 4}
    params = [greedy(150) for _ in range(4)]
    prompts = [[one, one] for one in range(4)]
    with Engine(l2, "ngram", **sizes) as engine:
        expected = engine.generate(prompts, params)
    for preemption in (True, False):
        with Engine(
            l2,
            "ngram",
            kv_cache_bytes=180_000,
            preemption=preemption,
            check_invariants=True,
            **sizes,
        ) as engine:
            assert_same(engine.generate(prompts, params), expected, preemption)
            outputs = [one.result(60) for one in [engine.submit(*p) for p in zip(prompts, params)]]  # noqa: B905
            assert_same(outputs, expected, preemption)
            times = [one.metrics.preemptions for one in outputs]
            assert (max(times) > 0) == preemption
            assert times[0] == 0  # the first to come never gives way
    with pytest.raises(InvalidArgumentError, match="preemption"):
        Engine("nowhere", preemption=1)  # type: ignore[arg-type]


def test_an_observer_that_fails_harms_nobody(l2: Path) -> None:
    class Fails(specrt.observer.Observer):
        def round(self, *_: Any) -> None:
            raise ValueError("no more")

    with Engine(l2, **SMALL) as engine:
        expected = engine.generate([1, 2], greedy(9))
        engine._scheduler.observer = Fails()
        with pytest.warns(RuntimeWarning, match="observer raised ValueError: no more"):
            assert_same([engine.generate([1, 2], greedy(9))], [expected], "beside it")


def exhaust(stream: Any) -> None:
    while True:
        next(stream)


def test_all_ways_to_ask_draft_alike(l2: Path) -> None:
    def counts(output: specrt.RequestOutput) -> list[int]:
        one = output.metrics
        return [one.drafted_tokens, one.accepted_tokens, one.rounds, one.completion_tokens]

    with Engine(l2, "ngram", enable_prefix_caching=False, **SMALL) as engine:
        expected = counts(engine.generate([1, 2, 1, 2], greedy(80)))
        assert expected[0] > 20
        assert counts(engine.submit([1, 2, 1, 2], greedy(80)).result(60)) == expected
        stream = engine.stream([1, 2, 1, 2], greedy(80))
        with pytest.raises(StopIteration) as end:
            exhaust(stream)
        assert counts(end.value.value) == expected


def test_a_short_soak(l2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "bench" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    status = soak.main(["--minutes", "0.04", "--model", str(l2), "--threads", "5"])
    told = capsys.readouterr()
    assert status == 0, told.err
    assert json.loads(told.out)["finished"] > 0
