"""An engine's metrics for Prometheus; needs `pip install 'specrt[metrics]'`.

    from prometheus_client import CollectorRegistry
    from specrt.prometheus import EngineCollector

    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

Names are vLLM's where vLLM has them, so that its dashboards work; `prefix` takes the place of
"vllm:". Nothing is kept here: each scrape reads `engine.metrics()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from .engine import Engine
    from .engine_metrics import Distribution, EngineMetrics

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise UnsupportedError(
        "[prometheus] expected prometheus_client, found none: pip install 'specrt[metrics]'"
    ) from missing

__all__ = ["EngineCollector"]


class EngineCollector(Collector):
    """Register one with a registry of yours, for all engines of a process: `add` the others."""

    def __init__(
        self, engine: Engine, *, prefix: str = "vllm:", labels: Mapping[str, str] | None = None
    ) -> None:
        """labels: of every sample; None: `model_name`, the engine's, and `engine`, "0"."""
        if not isinstance(prefix, str) or not _is_name(prefix + "x"):
            raise InvalidArgumentError(
                f"[prefix] expected what a Prometheus name may begin with, got {prefix!r}"
            )
        self._prefix = prefix
        self._engines: list[_Engine] = []
        self.add(engine, labels=labels)

    def add(self, engine: Engine, *, labels: Mapping[str, str] | None = None) -> None:
        """One more engine under the same names, told apart by its labels.

        labels: None: as the first's, with the number of engines before it. Raises
        InvalidArgumentError, also for labels that another one has.
        """
        if labels is None:
            labels = {"model_name": engine.name, "engine": str(len(self._engines))}
        if not isinstance(labels, Mapping):
            raise InvalidArgumentError(f"[labels] expected texts by name, got {labels!r}")
        for name, value in labels.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise InvalidArgumentError(
                    f"[labels] expected texts by name, got {name!r}: {value!r}"
                )
            taken = name in ("le", "position", "finished_reason") or name.startswith("__")
            if taken or not _is_name(name) or ":" in name:
                raise InvalidArgumentError(f"[labels] expected names of labels, got {name!r}")
        if any(one.labels == labels for one in self._engines):
            raise InvalidArgumentError(
                f"[labels] expected labels that no other engine has, got {dict(labels)!r}"
            )
        self._engines.append(_Engine(engine, self._prefix, dict(labels)))

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape. A closed engine has nothing to tell."""
        families: dict[str, Metric] = {}
        for one in self._engines:
            for family in one.collect():
                if family.name in families:  # a name may be told of once only
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()

    def describe(self) -> Sequence[Metric]:
        """Nothing ahead of time, so registering asks the engines nothing."""
        return []


class _Engine:
    """What one engine has to tell."""

    def __init__(self, engine: Engine, prefix: str, labels: dict[str, str]) -> None:
        self.labels = labels
        self._engine = engine
        self._prefix = prefix
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        try:
            metrics = self._engine.metrics()
        except InvalidArgumentError:
            return
        yield from self._gauges(metrics)
        yield from self._counters(metrics)
        yield from self._speculation(metrics)
        yield from self._histograms(metrics)

    def _gauges(self, metrics: EngineMetrics) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running", "Requests that rounds are run for.", metrics.requests_running
        )
        yield self._gauge("num_requests_waiting", "Requests queued.", metrics.requests_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", metrics.kv_cache_usage
        )

    def _counters(self, metrics: EngineMetrics) -> Iterator[Metric]:
        totals = metrics.totals
        for name, about, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", totals.prompt_tokens),
            ("prefix_cache_hits", "Of these, found cached.", totals.cached_prompt_tokens),
            ("num_preemptions", "Requests that gave up their cache.", metrics.preemptions),
            ("prompt_tokens", "Prompt tokens taken in.", totals.prompt_tokens),
            ("generation_tokens", "Tokens generated.", totals.completion_tokens),
        ):
            yield self._counter(name, about, value)
        finished = CounterMetricFamily(
            self._prefix + "request_success",
            "Requests that ended, by how.",
            labels=[*self._names, "finished_reason"],
        )
        for reason in sorted({"stop", "length", "abort", "error", *metrics.requests_finished}):
            finished.add_metric([*self._values, reason], metrics.requests_finished.get(reason, 0))
        yield finished

    def _speculation(self, metrics: EngineMetrics) -> Iterator[Metric]:
        totals = metrics.totals
        for name, about, value in (
            ("spec_decode_num_drafts", "Rounds that had a draft.", totals.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", totals.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Of these, accepted.", totals.accepted_tokens),
        ):
            yield self._counter(name, about, value)
        accepted = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Tokens accepted by depth, 0 the first; without rounds that a limit cut.",
            labels=[*self._names, "position"],
        )
        for position, count in enumerate(totals.accepted_per_position):
            accepted.add_metric([*self._values, str(position)], count)
        yield accepted
        # vLLM has none of these.
        yield self._counter("spec_decode_num_rounds", "Rounds of requests.", totals.rounds)
        yield self._counter("forward_passes", "Passes of the target.", metrics.passes)
        yield self._counter("forward_rows", "Tokens in these passes.", metrics.rows)
        for name, seconds in (
            ("draft", totals.draft_seconds),
            ("verify", totals.verify_seconds),
            ("sample", totals.sample_seconds),
            ("prefill", totals.prefill_seconds),
        ):
            yield self._counter(f"{name}_seconds", f"Seconds of the {name} step.", seconds)

    def _histograms(self, metrics: EngineMetrics) -> Iterator[Metric]:
        for name, about, one in (
            ("time_to_first_token_seconds", "From submission.", metrics.ttft),
            ("inter_token_latency_seconds", "Between rounds with tokens.", metrics.inter_token),
            ("request_time_per_output_token_seconds", "Mean after the first.", metrics.tpot),
            ("e2e_request_latency_seconds", "From submission to the end.", metrics.total),
            ("request_queue_time_seconds", "Before it first ran.", metrics.queue),
            ("request_prefill_time_seconds", "From then to the first token.", metrics.prefill),
            ("request_decode_time_seconds", "From there to the last.", metrics.decode),
        ):
            yield self._histogram(name, about, one)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, about, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        """prometheus_client appends "_total" to the name."""
        family = CounterMetricFamily(self._prefix + name, about, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _histogram(self, name: str, about: str, one: Distribution) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, about, labels=self._names)
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip([*one.bounds, float("inf")], one.buckets, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), seen))
        family.add_metric(self._values, buckets, sum_value=one.total)
        return family


def _is_name(value: Any) -> bool:
    import re

    return re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", value) is not None
