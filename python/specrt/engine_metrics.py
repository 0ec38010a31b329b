"""What an engine has done so far, all requests together."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .observer import Observer
from .outputs import Metrics

if TYPE_CHECKING:
    from ._core import Decoder
    from .request import Request

__all__ = ["Distribution", "EngineMetrics", "MetricsObserver"]

# Upper bounds in seconds, as vLLM has them, so that one dashboard serves both.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
RECENT = 4096
"""Values that percentiles are of."""
ROUNDS = 32
"""Rounds whose waits are looked at together."""


@dataclass(frozen=True)
class Distribution:
    """Many values of one kind, in seconds. Percentiles are of the last 4096, 0.0 of none."""

    count: int = 0
    total: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets below; the last bucket has none."""
    buckets: tuple[int, ...] = ()
    """How many of all values fell into each: one more than bounds."""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return "–"
        return f"{_time(self.p50)} median, {_time(self.p90)} p90, {_time(self.p99)} p99"


class _Values:
    """A distribution as it grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._fresh: list[float] = []
        """Not sorted into buckets yet: rounds, which add, have no time for it."""

    def add(self, value: float) -> None:
        self._fresh.append(value)
        if len(self._fresh) == RECENT:
            self._sort_in()

    def _sort_in(self) -> None:
        for value in self._fresh:
            self._buckets[bisect_left(self._bounds, value)] += 1
            self._total += value
        self._recent.extend(self._fresh)
        self._fresh.clear()

    def distribution(self) -> Distribution:
        self._sort_in()
        p50, p90, p99 = percentiles(self._recent, (50, 90, 99))
        return Distribution(
            count=sum(self._buckets),
            total=self._total,
            p50=p50,
            p90=p90,
            p99=p99,
            bounds=self._bounds,
            buckets=tuple(self._buckets),
        )


def percentiles(values: Sequence[float] | deque[float], which: Sequence[float]) -> list[float]:
    """By linear interpolation between ranks; 0.0 of no values."""
    ranked = sorted(values)
    if not ranked:
        return [0.0] * len(which)
    found = []
    for percent in which:
        place = percent / 100 * (len(ranked) - 1)
        low = int(place)
        high = min(low + 1, len(ranked) - 1)
        found.append(ranked[low] + (place - low) * (ranked[high] - ranked[low]))
    return found


@dataclass(frozen=True)
class EngineMetrics:
    """An engine at one moment. Counters are since it was made, running requests included."""

    model: str = ""
    uptime_seconds: float = 0.0
    requests_waiting: int = 0
    requests_running: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    """By finish reason; "error" for those that failed, "abort" for those that were withdrawn."""
    preemptions: int = 0
    kv_cache_tokens: int = 0
    """Tokens that the target's KV cache holds at most."""
    kv_cache_usage: float = 0.0
    """The share of it that running requests hold, or have set aside."""
    passes: int = 0
    """Forward passes of the target; one serves a round of each request in it."""
    rows: int = 0
    """Tokens in these passes: of prompts, last tokens, drafts."""
    totals: Metrics = field(default_factory=Metrics)
    """The counters and rates of `Metrics` over all requests. Its seconds of drafting, verifying,
    sampling and prefill count each pass once; its clocks are 0."""
    queue: Distribution = field(default_factory=Distribution)
    """From submission until it first ran."""
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    """Of finished requests: mean time a token after the first."""
    inter_token: Distribution = field(default_factory=Distribution)
    """Waits between rounds that gave tokens."""
    total: Distribution = field(default_factory=Distribution)
    """Of finished requests: from submission to the last token."""
    prefill: Distribution = field(default_factory=Distribution)
    """Of finished requests: from when it first ran to the first token."""
    decode: Distribution = field(default_factory=Distribution)
    """Of finished requests: from the first token to the last."""

    @property
    def prefix_hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache."""
        tokens = self.totals.prompt_tokens
        return self.totals.cached_prompt_tokens / tokens if tokens else 0.0

    def __str__(self) -> str:
        one = self.totals
        done = sum(self.requests_finished.values())
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.requests_finished.items())
        draft, verify, sample = one.time_shares
        lines = [
            f"requests     {self.requests_running} running, {self.requests_waiting} waiting, "
            f"{done} finished" + (f" ({reasons})" if reasons else "")
            + (f", {self.preemptions} preemptions" if self.preemptions else ""),
            f"tokens       {one.prompt_tokens} of prompts ({self.prefix_hit_rate:.0%} from the "
            f"prefix cache), {one.completion_tokens} generated",
            f"speculation  {one.rounds} rounds in {self.passes} passes · "
            f"τ {one.acceptance_length:.2f} · α {one.alpha:.2f} · γ {one.gamma:.1f} · "
            f"{one.wasted_tokens} of {one.drafted_tokens} drafted tokens wasted",
        ]  # fmt: skip
        if one.alpha_per_position:
            rates = " ".join(f"{rate:.2f}" for rate in one.alpha_per_position[:12])
            lines.append(f"α by depth   {rates}")
        lines += [
            f"time         drafting {draft:.0%}, verifying {verify:.0%}, sampling {sample:.0%}",
            f"queue        {self.queue}",
            f"TTFT         {self.ttft}",
            f"TPOT         {self.tpot}",
            f"inter-token  {self.inter_token}",
            f"KV cache     {self.kv_cache_usage:.0%} of {self.kv_cache_tokens} tokens",
        ]
        return "\n".join(lines)

    __repr__ = __str__


class MetricsObserver(Observer):
    """Keeps the clocks of an engine's requests; the core itself counts its rounds."""

    def __init__(self) -> None:
        # Reentrant, since the collector may end a stream, which is told here, in between.
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._finished: Counter[str] = Counter()
        self._preemptions = 0
        self._rounds: list[tuple[float, Sequence[tuple[Any, ...]]]] = []
        """When they ended and what they gave, not looked at yet: see `_catch_up`."""
        # By the core's sequence:
        self._arrived: dict[int, float] = {}  # of those that have no token yet
        self._last_token: dict[int, float] = {}
        self._queue = _Values(REQUEST)
        self._ttft = _Values(FIRST_TOKEN)
        self._tpot = _Values(PER_TOKEN)
        self._inter_token = _Values(PER_TOKEN)
        self._total = _Values(REQUEST)
        self._prefill = _Values(REQUEST)
        self._decode = _Values(REQUEST)

    def admitted(self, request: Request) -> None:
        if request.preemptions == 0 and request.admitted is not None:
            with self._lock:
                self._queue.add(request.admitted - request.arrived)
                if request.id is not None:
                    self._arrived[request.id] = request.arrived

    def round(
        self, plan: Sequence[tuple[int, int]], results: Sequence[tuple[Any, ...]], seconds: float
    ) -> None:
        self._rounds.append((time.monotonic(), results))
        if len(self._rounds) >= ROUNDS:
            with self._lock:
                self._catch_up()

    def _catch_up(self) -> None:
        """Waits between the rounds so far. Many rounds in one go: a single one, with all caches
        full of what the pass has read, takes several times as long."""
        rounds, self._rounds = self._rounds, []
        last = self._last_token
        add = self._inter_token.add
        for now, results in rounds:
            for sequence, tokens, _, _, finish, _, _ in results:
                if not tokens:
                    continue
                before = last.get(sequence)
                if before is not None:
                    add(now - before)
                elif (arrived := self._arrived.pop(sequence, None)) is not None:
                    self._ttft.add(now - arrived)
                if finish:
                    last.pop(sequence, None)
                else:
                    last[sequence] = now

    def preempted(self, request: Request) -> None:
        with self._lock:
            self._preemptions += 1
            self._catch_up()

    def finished(self, request: Request) -> None:
        with self._lock:
            self._forget(request)
            reason = "error" if request.error is not None else request.finish_reason or "abort"
            self._finished[reason] += 1
            first, last = request.first_token, request.last_token
            if first is None or last is None:
                return
            if request.error is not None:
                return
            self._total.add(last - request.arrived)
            if request.admitted is not None:
                self._prefill.add(first - request.admitted)
            self._decode.add(last - first)
            if request.token_count > 1:
                self._tpot.add((last - first) / (request.token_count - 1))

    def _forget(self, request: Request) -> None:
        self._catch_up()
        if request.id is not None:
            self._last_token.pop(request.id, None)
            self._arrived.pop(request.id, None)

    def snapshot(
        self, decoder: Decoder, *, model: str, waiting: int, running: int, kv_cache_tokens: int
    ) -> EngineMetrics:
        """The engine as it is. Between rounds only."""
        passes, rows, counters = decoder.totals
        with self._lock:
            self._catch_up()
            return EngineMetrics(
                model=model,
                uptime_seconds=time.monotonic() - self._began,
                requests_waiting=waiting,
                requests_running=running,
                requests_finished=dict(self._finished),
                preemptions=self._preemptions,
                kv_cache_tokens=kv_cache_tokens,
                kv_cache_usage=_usage(decoder.free_kv_tokens, kv_cache_tokens),
                passes=passes,
                rows=rows,
                totals=Metrics.of(counters),
                queue=self._queue.distribution(),
                ttft=self._ttft.distribution(),
                tpot=self._tpot.distribution(),
                inter_token=self._inter_token.distribution(),
                total=self._total.distribution(),
                prefill=self._prefill.distribution(),
                decode=self._decode.distribution(),
            )


def _usage(free: int, tokens: int) -> float:
    return min(1.0, max(0.0, 1.0 - free / tokens)) if tokens else 0.0


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
