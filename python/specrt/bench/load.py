"""`specrt-bench load`: policies side by side while requests queue up."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine_metrics import percentiles
from ..errors import InvalidArgumentError
from ..sampling import SamplingParams
from .plots import Plot
from .prompts import Totals
from .report import Report, progress, table
from .stats import Spread, beside_best, mean_interval
from .targets import PLAIN, Contender, Target

if TYPE_CHECKING:
    from ..engine import Engine
    from ..handle import RequestHandle
    from ..outputs import Metrics, RequestOutput

__all__ = ["Level", "measure"]


@dataclass(frozen=True)
class Level:
    """How much is asked for: so many requests at any time, or so many a second on average."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"

    def as_json(self) -> dict[str, Any]:
        return {"concurrency": self.concurrency, "rate": self.rate}


@dataclass
class Repetition:
    """One contender under one load, once."""

    seconds: float
    """From the first submission to the last token."""
    outputs: list[RequestOutput]

    @property
    def throughput(self) -> float:
        """Tokens a second, all requests together."""
        tokens = sum(len(one.token_ids) for one in self.outputs)
        return tokens / self.seconds if self.seconds else 0.0


def measure(
    target: Target,
    contenders: Sequence[Contender],
    levels: Sequence[Level],
    *,
    prompts: Sequence[list[int]],
    requests: int | None,
    max_tokens: int,
    repeats: int,
    target_tpot: float | None = None,
    max_batch_size: int | None = None,
    synthetic: float | None = None,
) -> Report:
    """Each level with each contender, by turns, `repeats` times after a short warm-up.

    requests: of a repetition; None: four times the concurrency, or a rate's ten seconds. All
    contenders get the same prompts at the same times. target_tpot: seconds a token after the first,
    which goodput plans for; tells how many requests stayed below, of all. synthetic: accept drafts
    with this probability.
    """
    if not levels:
        raise InvalidArgumentError("[load] expected concurrencies or rates, got none")
    for level in levels:
        if level.concurrency is not None and level.concurrency < 1:
            raise InvalidArgumentError(f"[concurrency] expected at least 1, got {level}")
        if level.rate is not None and not 0 < level.rate < math.inf:
            raise InvalidArgumentError(f"[rate] expected requests a second, got {level.rate}")
    for name, value in (("repeats", repeats), ("max_tokens", max_tokens), ("requests", requests)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"[{name}] expected at least 1, got {value}")
    names = [one.name for one in contenders]
    for what, each in (("contenders", names), ("levels", [str(one) for one in levels])):
        if twice := {one for one in each if each.count(one) > 1}:
            raise InvalidArgumentError(
                f"[{what}] expected each once, got {', '.join(sorted(twice))} twice"
            )
    most = max_batch_size or max(one.concurrency or 32 for one in levels)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    found: dict[tuple[str, str], list[Repetition]] = {}
    with ExitStack() as stack:
        engines = {
            one.name: stack.enter_context(
                target.engine(
                    one,
                    max_batch_size=most,
                    enable_prefix_caching=False,
                    **_options(one, synthetic, target_tpot),
                )
            )
            for one in contenders
        }
        total = len(names) * (1 + len(levels) * repeats)
        with progress(total, "warming up") as ticks:
            for name in names:
                engines[name].generate(list(prompts[:2]), params)
                ticks.step()
            for turn in range(repeats):
                for place, level in enumerate(levels):
                    count = requests or _requests(level)
                    work = [prompts[(turn * count + i) % len(prompts)] for i in range(count)]
                    shift = (turn + place) % len(names)
                    for name in names[shift:] + names[:shift]:
                        ticks.step(f"turn {turn + 1} of {repeats}: {level} {name}")
                        found.setdefault((str(level), name), []).append(
                            run_level(engines[name], level, work, params, seed=turn)
                        )
    rows = [
        _row(level, one, contenders, found, target_tpot) for level in levels for one in contenders
    ]
    different = sorted({row["name"] for row in rows if row["same_text"] is False})
    return Report(
        benchmark="load",
        target=target.describe(),
        settings={
            "levels": [one.as_json() for one in levels],
            "requests": requests,
            "max_tokens": max_tokens,
            "repeats": repeats,
            "target_tpot_seconds": target_tpot,
            "max_batch_size": most,
            "synthetic_acceptance_rate": synthetic,
        },
        rows=rows,
        heading=f"target  {target}    {_text(different, synthetic)}",
        tables=[_table(rows, level, target_tpot) for level in levels],
        notes=[
            f"{max_tokens} tokens a request, median of {repeats} repetitions by turns",
            "vs best: mean ratio to the best of plain and fixed γ and its 95 % interval, chosen on "
            "half of the repetitions and compared on the other half",
        ],
        plots=_plots(rows, names, levels),
        failed=f"another text than plain decoding's: {', '.join(different)}" if different else None,
    )


def _options(one: Contender, synthetic: float | None, target_tpot: float | None) -> dict[str, Any]:
    """Of a contender's engine: plain decoding takes neither, and targets are for goodput alone,
    which an engine has by default."""
    found: dict[str, Any] = {}
    if synthetic is not None and one != PLAIN:
        found["synthetic_acceptance_rate"] = synthetic
    if target_tpot is not None and one != PLAIN and one.policy in (None, "goodput"):
        found["target_tpot_seconds"] = target_tpot
    return found


def _text(different: Sequence[str], synthetic: float | None) -> str:
    if synthetic is not None:
        return "synthetic acceptance: not the model's text"
    return f"same text: {'NO' if different else 'yes'}"


def _requests(level: Level) -> int:
    if level.concurrency is not None:
        return 4 * level.concurrency
    return max(4, round(10 * (level.rate or 0.0)))


def run_level(
    engine: Engine,
    level: Level,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    seed: int,
) -> Repetition:
    """Submits all prompts as the level says and waits for the last."""
    began = time.monotonic()
    if level.concurrency is not None:
        outputs = _closed(engine, level.concurrency, prompts, params)
    else:
        assert level.rate is not None
        gaps = np.random.default_rng(seed).exponential(1 / level.rate, len(prompts))
        gaps[0] = 0.0  # the clock starts with the first
        outputs = _open(engine, np.cumsum(gaps).tolist(), prompts, params)
    return Repetition(time.monotonic() - began, outputs)


def _closed(
    engine: Engine, concurrency: int, prompts: Sequence[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """As many at any time: one more whenever one ends."""
    import threading

    waiting = list(range(len(prompts)))[::-1]
    outputs: dict[int, RequestOutput] = {}
    failures: list[BaseException] = []
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if not waiting or failures:
                    return
                place = waiting.pop()
            try:
                output = engine.submit(prompts[place], params).result()
            except BaseException as error:
                with lock:
                    failures.append(error)
                return
            with lock:
                outputs[place] = output

    clients = [threading.Thread(target=client) for _ in range(min(concurrency, len(prompts)))]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    if failures:
        raise failures[0]
    return [outputs[place] for place in range(len(prompts))]


def _open(
    engine: Engine, times: Sequence[float], prompts: Sequence[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Each at its time, whatever has become of the others."""
    began = time.monotonic()
    handles: list[RequestHandle] = []
    for at, prompt in zip(times, prompts, strict=True):
        left = at - (time.monotonic() - began)
        if left > 0:
            time.sleep(left)
        handles.append(engine.submit(prompt, params))
    return [one.result() for one in handles]


def _row(
    level: Level,
    contender: Contender,
    contenders: Sequence[Contender],
    found: dict[tuple[str, str], list[Repetition]],
    target_tpot: float | None,
) -> dict[str, Any]:
    own = found[str(level), contender.name]
    plain = found[str(level), PLAIN.name]
    speeds = [one.throughput for one in own]
    ratios = [ours / theirs.throughput for ours, theirs in zip(speeds, plain, strict=True)]
    outputs = [output for one in own for output in one.outputs]
    metrics = [output.metrics for output in outputs]
    lossless = all(output.lossless for output in outputs)
    same: bool | None = None
    if contender != PLAIN and lossless:
        same = all(
            a.token_ids == b.token_ids
            for ours, theirs in zip(own, plain, strict=True)
            for a, b in zip(ours.outputs, theirs.outputs, strict=True)
        )
    fixed = [one for one in contenders if one == PLAIN or one.policy == "fixed"]
    beside = None
    if contender not in fixed:
        beside = beside_best(
            speeds,
            {one.name: [rep.throughput for rep in found[str(level), one.name]] for one in fixed},
        )
    gaps = [gap for one in metrics for gap in one.inter_token_seconds]
    return {
        "level": level.as_json(),
        "name": contender.name,
        "throughput": Spread.of(speeds).as_json(),
        "throughputs": speeds,
        "vs_plain": mean_interval(ratios).as_json(),
        "vs_best": None if beside is None else beside.ratio.as_json(),
        "best": None if beside is None else list(beside.best),
        "gamma_used": _mean_gamma(metrics),
        "acceptance_length": Totals.of(metrics).acceptance_length,
        "ttft_seconds": _percentiles([one.ttft_seconds for one in metrics]),
        "tpot_seconds": _percentiles([one.tpot_seconds for one in metrics]),
        "inter_token_seconds": _percentiles(gaps),
        "queue_seconds": _percentiles([one.queue_seconds for one in metrics]),
        "preemptions": sum(one.preemptions for one in metrics),
        "tpot_met": None
        if target_tpot is None
        else sum(one.tpot_seconds <= target_tpot for one in metrics) / len(metrics),
        "lossless": lossless,
        "same_text": same,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = percentiles(values, (50, 90, 99))
    return {"p50": p50, "p90": p90, "p99": p99}


def _mean_gamma(metrics: Sequence[Metrics]) -> float:
    rounds = sum(one.rounds for one in metrics)
    return sum(one.drafted_tokens for one in metrics) / rounds if rounds else 0.0


def _table(rows: list[dict[str, Any]], level: Level, target_tpot: float | None) -> Any:
    columns = ["", "tok/s", "vs plain", "vs best", "γ used", "τ"]
    columns += ["TTFT p50", "p99", "TPOT p50", "p99", "gap p50", "p99"]
    if target_tpot is not None:
        columns.append("met")
    shown = []
    for row in rows:
        if row["level"] != level.as_json():
            continue
        cells = [
            row["name"],
            f"{row['throughput']['median']:.1f}",
            f"{row['vs_plain']['mean']:.2f}",
        ]
        cells.append(_interval(row["vs_best"]))
        cells += [f"{row['gamma_used']:.1f}", f"{row['acceptance_length']:.2f}"]
        for what in ("ttft_seconds", "tpot_seconds", "inter_token_seconds"):
            cells += [f"{1e3 * row[what][one]:.0f} ms" for one in ("p50", "p99")]
        if target_tpot is not None:
            cells.append(f"{row['tpot_met']:.0%}")
        shown.append(cells)
    what = f"{level.concurrency} at a time" if level.rate is None else f"{level} (Poisson)"
    return table(columns, shown, title=what)


def _interval(value: dict[str, float | None] | None) -> str:
    if value is None:
        return "–"
    margin = value["margin"]
    return f"{value['mean']:.2f}" + ("" if margin is None else f" ±{margin:.2f}")


def _plots(rows: list[dict[str, Any]], names: Sequence[str], levels: Sequence[Level]) -> list[Plot]:
    plots = []
    for by_rate in (False, True):
        chosen = [one for one in levels if (one.rate is not None) == by_rate]
        if not chosen:
            continue
        x = [float((one.rate if by_rate else one.concurrency) or 0) for one in chosen]
        where = [one.as_json() for one in chosen]

        def lines(value: Any, where: list[dict[str, Any]] = where) -> dict[str, list[float]]:
            return {
                name: [
                    float(value(row))
                    for level in where
                    for row in rows
                    if row["name"] == name and row["level"] == level
                ]
                for name in names
            }

        label = "requests a second" if by_rate else "requests at a time"
        log = not by_rate
        shown = x if by_rate else [int(one) for one in x]
        plots += [
            Plot("Throughput", label, "tokens/s",
                 shown, lines(lambda row: row["throughput"]["median"]), log_x=log),
            Plot("Time per token after the first, median", label, "ms",
                 shown, lines(lambda row: 1e3 * row["tpot_seconds"]["p50"]), log_x=log),
        ]  # fmt: skip
    return plots
