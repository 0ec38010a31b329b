"""What `engine.metrics()` says, and what Prometheus reads of it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import Branching, Counting, greedy, known
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specrt import (
    Distribution,
    Engine,
    EngineMetrics,
    InvalidArgumentError,
    SamplingParams,
    StructuredOutputs,
)
from specrt.engine_metrics import FIRST_TOKEN, _Values, percentiles
from specrt.prometheus import EngineCollector

SMALL: dict[str, Any] = {"max_model_len": 256, "max_batch_size": 4, "threads": 1}


def test_nothing_yet(counter: Path) -> None:
    with Engine(counter, "ngram", **SMALL) as engine:
        metrics = engine.metrics()
    assert metrics.passes == metrics.rows == metrics.totals.completion_tokens == 0
    assert metrics.requests_running == metrics.requests_waiting == 0
    assert metrics.prefix_hit_rate == metrics.kv_cache_usage == metrics.totals.gamma == 0
    assert metrics.totals.time_shares == (0, 0, 0)
    assert "0 running" in repr(metrics)
    assert "–" in str(EngineMetrics())
    assert str(Distribution()) == "–"
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.metrics()


def test_totals_are_those_of_all_requests(l2: Path) -> None:
    prompts: list[Any] = [[5, 6, 7], [5, 6, 7, 8], list(range(40)), [9]]
    params = [greedy(n) for n in (30, 17, 9, 1)]
    with Engine(l2, **SMALL) as engine:
        drafter = Branching(known(engine.generate(prompts, params)), 264)
    with Engine(l2, drafter, num_speculative_tokens=6, **SMALL) as engine:
        outputs = engine.generate(prompts, params)
        metrics = engine.metrics()
    totals, each = metrics.totals, [one.metrics for one in outputs]
    for name in (
        "prompt_tokens",
        "cached_prompt_tokens",
        "completion_tokens",
        "rounds",
        "drafts",
        "drafted_tokens",
        "accepted_tokens",
        "wasted_tokens",
        "truncated_rounds",
    ):
        assert getattr(totals, name) == sum(getattr(one, name) for one in each), name
    for depth, count in enumerate(totals.accepted_per_position):
        assert count == sum(
            one.accepted_per_position[depth]
            for one in each
            if depth < len(one.accepted_per_position)
        )
    assert totals.sources["Branching"].drafted_tokens == totals.drafted_tokens > 0
    assert totals.gamma == totals.drafted_tokens / totals.rounds
    assert math.isclose(sum(totals.time_shares), 1)
    # Requests share passes: their time counts once.
    assert metrics.passes < totals.rounds
    assert 0 < totals.verify_seconds < sum(one.verify_seconds for one in each)
    assert metrics.rows == totals.prompt_tokens + totals.rounds + totals.drafted_tokens
    assert metrics.requests_finished == {"length": 4}


def test_waits_of_who_was_preempted_count(l2: Path) -> None:
    sizes: dict[str, Any] = {"max_model_len": 256, "block_size": 4, "threads": 1}
    sizes |= {"max_batch_size": 4, "max_num_batched_tokens": 24}
    with Engine(l2, kv_cache_bytes=180_000, **sizes) as engine:
        outputs = engine.generate([[one, one] for one in range(4)], greedy(200, ignore_eos=True))
        metrics = engine.metrics()
    assert metrics.preemptions > 0
    waits = [wait for one in outputs for wait in one.metrics.inter_token_seconds]
    assert metrics.inter_token.count == len(waits)
    assert math.isclose(metrics.inter_token.total, sum(waits), rel_tol=0.02, abs_tol=0.01)
    assert metrics.ttft.count == 4


def test_first_tokens_count_while_requests_run(counter: Path) -> None:
    with Engine(counter, **SMALL) as engine:
        stream = engine.stream([1], greedy(60))
        for _ in range(3):
            next(stream)
        assert engine.metrics().ttft.count == 1
        stream.close()
        assert engine.metrics().ttft.count == 1


def test_clocks_of_requests(counter: Path) -> None:
    with Engine(counter, Counting(), num_speculative_tokens=3, **SMALL) as engine:
        outputs = engine.generate([[1], [2], [3], [4], [5], [6]], greedy(20))
        metrics = engine.metrics()
    assert [one.count for one in (metrics.ttft, metrics.tpot, metrics.total)] == [6, 6, 6]
    assert metrics.queue.count == metrics.prefill.count == metrics.decode.count == 6
    assert metrics.inter_token.count == sum(one.metrics.rounds for one in outputs)
    for output in outputs:
        one = output.metrics
        assert len(one.inter_token_seconds) == one.rounds
        spent = one.ttft_seconds + sum(one.inter_token_seconds)
        assert math.isclose(spent, one.total_seconds, abs_tol=1e-6)
        assert 0 <= one.queue_seconds < one.ttft_seconds
    # Four at a time: the last two waited for others to end.
    assert min(one.metrics.queue_seconds for one in outputs[4:]) > max(
        one.metrics.queue_seconds for one in outputs[:4]
    )
    each = sum(one.metrics.ttft_seconds for one in outputs)
    assert math.isclose(metrics.ttft.total, each, abs_tol=6e-3)  # a round's end, and its delivery
    assert 0 < metrics.ttft.p50 <= metrics.ttft.p90 <= metrics.ttft.p99


def test_metrics_while_requests_run(counter: Path) -> None:
    with Engine(counter, **{**SMALL, "max_batch_size": 1}) as engine:
        first, second = (engine.stream([one], greedy(60)) for one in (1, 2))
        next(first)
        metrics = engine.metrics()
        assert (metrics.requests_running, metrics.requests_waiting) == (1, 0)
        assert metrics.totals.completion_tokens >= 1
        assert 0 < metrics.kv_cache_usage <= 1
        first.close()
        assert engine.metrics().requests_finished == {"abort": 1}
        assert engine.metrics().kv_cache_usage == 0
        second.close()


def test_prefix_hits(l2: Path) -> None:
    prompt = list(range(100))
    with Engine(l2, **SMALL) as engine:
        for _ in range(2):
            engine.generate([prompt], greedy(2))
        metrics = engine.metrics()
    assert metrics.totals.prompt_tokens == 200
    assert metrics.totals.cached_prompt_tokens == 96
    assert metrics.prefix_hit_rate == 0.48


def test_requests_that_fail(counter: Path) -> None:
    class Broken(Counting):
        def propose(self, tokens: list[int], budget: int) -> Any:
            raise RuntimeError("no idea")

    with Engine(counter, Broken(), **SMALL) as engine:
        with pytest.raises(Exception, match="no idea"):
            engine.generate([3], greedy(9))
        assert engine.metrics().requests_finished == {"error": 1}


def test_percentiles() -> None:
    assert percentiles([], (50, 99)) == [0, 0]
    assert percentiles([3.0], (0, 50, 100)) == [3, 3, 3]
    assert percentiles([4.0, 1.0, 3.0, 2.0], (0, 50, 100)) == [1, 2.5, 4]
    values = _Values((1.0, 2.0))
    for one in (0.5, 1.0, 1.5, 9.0):
        values.add(one)
    told = values.distribution()
    assert (told.buckets, told.count, told.total) == ((2, 1, 1), 4, 12)
    assert told.mean == 3


def scrape(engine: Engine, **options: Any) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, **options))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_has_vllms_names(counter: Path) -> None:
    with Engine(counter, Counting(), num_speculative_tokens=3, **SMALL) as engine:
        engine.generate([1], greedy(20))
        engine.generate([1, 2, 3], greedy(9, stop_token_ids=[8]))
        metrics = engine.metrics()
        found = scrape(engine)
    labels = (("engine", "0"), ("model_name", engine.name))
    totals = metrics.totals

    def value(name: str, *more: tuple[str, str]) -> float:
        return float(found[(f"vllm:{name}", *sorted((*labels, *more)))])

    assert value("spec_decode_num_drafts_total") == totals.drafts > 0
    assert value("spec_decode_num_draft_tokens_total") == totals.drafted_tokens
    assert value("spec_decode_num_accepted_tokens_total") == totals.accepted_tokens > 0
    for position, count in enumerate(totals.accepted_per_position):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert value(name, ("position", str(position))) == count
    assert value("generation_tokens_total") == totals.completion_tokens
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 4
    assert value("prefix_cache_hits_total") == value("num_preemptions_total") == 0
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    assert value("request_success_total", ("finished_reason", "length")) == 1
    assert value("request_success_total", ("finished_reason", "stop")) == 1
    assert value("request_success_total", ("finished_reason", "abort")) == 0
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert value(f"{name}_count") == value(f"{name}_bucket", ("le", "+Inf")) == 2, name
    assert value("inter_token_latency_seconds_count") == totals.rounds
    buckets = [value("time_to_first_token_seconds_bucket", ("le", str(b))) for b in FIRST_TOKEN]
    assert buckets == sorted(buckets)
    assert math.isclose(value("time_to_first_token_seconds_sum"), metrics.ttft.total)


def test_prometheus_prefix_and_labels(counter: Path) -> None:
    with Engine(counter, **SMALL) as engine:
        found = scrape(engine, prefix="specrt_", labels={"host": "a"})
        assert found[("specrt_num_requests_running", ("host", "a"))] == 0
        assert scrape(engine, labels={})[("vllm:prompt_tokens_total",)] == 0
        for options in (
            {"prefix": "1"},
            {"prefix": None},
            {"labels": {"le": "a"}},
            {"labels": {"a b": "a"}},
            {"labels": {"a": 1}},
            {"labels": {"__name__": "a"}},
            {"labels": 5},
        ):
            with pytest.raises(InvalidArgumentError):
                EngineCollector(engine, **options)  # type: ignore[arg-type]
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
    assert generate_latest(registry) == b""  # closed


def test_prometheus_of_two_engines(counter: Path) -> None:
    """One family a name, whatever the number of engines: some readers refuse a second."""
    with Engine(counter, **SMALL) as first, Engine(counter, **SMALL) as second:
        first.generate([1], greedy(3))
        second.generate([1], greedy(5))
        collector = EngineCollector(first)
        with pytest.raises(InvalidArgumentError, match="no other engine"):
            collector.add(second, labels={"model_name": first.name, "engine": "0"})
        collector.add(second)
        registry = CollectorRegistry()
        registry.register(collector)
        text = generate_latest(registry).decode()
        first.close()
        left = generate_latest(registry).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 20
    for engine, count in (("0", 3), ("1", 5)):
        labels = f'engine="{engine}",model_name="{first.name}"'
        said = [
            line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        assert f"vllm:generation_tokens_total{{{labels}}} {count}.0" in said
    assert 'engine="0"' not in left
    assert 'engine="1"' in left


def test_counters_never_fall(l2: Path) -> None:
    """Between any two scrapes, whatever is cancelled, stopped by a text or preempted."""
    options = {**SMALL, "kv_cache_bytes": 150_000, "max_num_batched_tokens": 16, "block_size": 4}
    counters: dict[Any, float] = {}
    with Engine(l2, "ngram", **options) as engine:
        handles = [
            engine.submit([one] * 20, SamplingParams(max_tokens=80, stop=["e", "t"], seed=one))
            for one in range(12)
        ]
        while not all(one.done for one in handles):
            for number, handle in enumerate(handles):
                if number % 3 == 0 and counters:
                    handle.cancel()
            for key, value in scrape(engine).items():
                if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert value >= counters.get(key, 0.0), key
                    counters[key] = value
        assert counters


def test_abandoned_samples_of_one_request(counter: Path) -> None:
    with Engine(counter, **SMALL) as engine:
        engine.generate([1], SamplingParams(n=3, temperature=1.0, max_tokens=5, seed=1))
        assert engine.metrics().requests_finished == {"length": 3}


def test_clocks_begin_when_a_request_is_made(l2_eos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes to compile a grammar is part of what its caller waits; and so the core is told
    how long a request has waited when it is let in."""
    from specrt.structured import Grammar

    slow = 0.05
    compile_ = Grammar.compile

    def compiled(self: Any, *rest: Any) -> Any:
        time.sleep(slow)
        return compile_(self, *rest)

    monkeypatch.setattr(Grammar, "compile", compiled)
    params = greedy(4, structured_outputs=StructuredOutputs(regex="[a-z]*"))
    messages = [{"role": "user", "content": "x"}]
    with Engine(l2_eos, **SMALL) as engine:
        for ask in (
            lambda: engine.generate("x", params),
            lambda: engine.chat(messages, params),
            lambda: engine.submit("x", params).result(60),
            lambda: engine.chat_submit(messages, params).result(60),
        ):
            metrics = ask().metrics
            assert metrics.queue_seconds >= slow
            assert metrics.ttft_seconds >= metrics.queue_seconds
        stream = engine.stream("x", greedy(4))
        time.sleep(10 * slow)  # nothing has been asked for yet
        output = None
        try:
            while True:
                next(stream)
        except StopIteration as end:
            output = end.value
        assert output is not None
        assert output.metrics.ttft_seconds < 10 * slow

        class Decoder:
            def add(self, *given: Any) -> int:
                self.waited = given[-1]
                return 0

        decoder: Any = Decoder()
        ((request,),) = engine._requests([[1]], greedy(4), time.monotonic() - 100)
        engine._scheduler._add(decoder, request)
        assert 100 <= decoder.waited < 160
