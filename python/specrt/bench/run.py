"""`specrt-bench run`: what drafters and policies gain on prompts, against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgumentError
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from ..trace import brief
from .plots import Plot
from .prompts import BenchPrompt, Totals
from .report import Report, progress, table
from .stats import Spread
from .targets import PLAIN, Contender, Target

__all__ = ["COLUMNS", "measure"]

COLUMNS = ("tok/s", "vs plain", "τ", "α", "γ used", "draft", "verify", "sample", "wasted")


@dataclass
class Turn:
    """One contender's answers to all prompts, in one repetition."""

    outputs: list[RequestOutput]
    seconds: float
    """Wall time of all of them."""

    def totals(self, chosen: Sequence[int]) -> Totals:
        return Totals.of(self.outputs[place].metrics for place in chosen)


def measure(
    target: Target,
    prompts: Sequence[BenchPrompt],
    contenders: Sequence[Contender],
    *,
    max_tokens: int,
    repeats: int,
    concurrency: int = 1,
    verification: str = "coupled",
    temperature: float = 0.0,
    by_kind: bool = False,
    ignore_eos: bool = False,
) -> Report:
    """All contenders answer all prompts, by turns, `repeats` times after a first that warms up.

    concurrency: prompts that run at once; with 1 speeds are of decoding alone (tokens after the
    first by their time), else of whole batches, prefill included.
    """
    for name, value in (("repeats", repeats), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidArgumentError(f"[{name}] expected at least 1, got {value}")
    if concurrency < 1:
        raise InvalidArgumentError(f"[concurrency] expected at least 1, got {concurrency}")
    ids = target.encode(prompts)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=ignore_eos
    )
    turns: dict[str, list[Turn]] = {one.name: [] for one in contenders}
    with ExitStack() as stack:
        engines = {
            one.name: stack.enter_context(
                # Prompts that are cached already would be no measure of the first token.
                target.engine(
                    one,
                    max_batch_size=concurrency,
                    verification=verification,
                    enable_prefix_caching=False,
                )
            )
            for one in contenders
        }
        groups = [ids[at : at + concurrency] for at in range(0, len(ids), concurrency)]
        names = list(engines)
        total = len(names) * (1 + len(groups) * repeats)
        with progress(total, "warming up") as ticks:
            for name in names:
                engines[name].generate(groups[0], params)
                ticks.step()
            for turn in range(repeats):
                found: dict[str, Turn] = {name: Turn([], 0.0) for name in names}
                for place, group in enumerate(groups):
                    # One after the other on the same prompts, another one first each time.
                    shift = (turn + place) % len(names)
                    for name in names[shift:] + names[:shift]:
                        ticks.step(f"turn {turn + 1} of {repeats}: {name}")
                        _answer(engines[name], group, params, found[name])
                for name in names:
                    turns[name].append(found[name])
    every = range(len(prompts))
    rows = [_row(one, turns, every, concurrency) for one in contenders]
    kinds = list(dict.fromkeys(one.kind for one in prompts)) if by_kind else []
    extra: dict[str, Any] = {}
    tables = [_table(rows, None)]
    for kind in kinds:
        chosen = [place for place in every if prompts[place].kind == kind]
        extra.setdefault("kinds", {})[kind] = [
            _row(one, turns, chosen, concurrency) for one in contenders
        ]
        tables.append(_table(extra["kinds"][kind], kind))
    different = [row["name"] for row in rows if row["same_text"] is False]
    drafters = dict.fromkeys(str(brief(one.drafter)) for one in contenders if one != PLAIN)
    heading = f"target  {target}    drafter {', '.join(drafters)}"
    heading += f"    {verification}, same text: {_same(rows)}"
    note = f"{len(prompts)} prompts, at most {max_tokens} tokens, {concurrency} at a time, "
    note += f"median of {repeats}, quartiles in the JSON"
    must_agree = verification == "coupled" or temperature == 0.0
    return Report(
        benchmark="run",
        target=target.describe(),
        settings={
            "prompts": len(prompts),
            "max_tokens": max_tokens,
            "repeats": repeats,
            "concurrency": concurrency,
            "verification": verification,
            "temperature": temperature,
        },
        rows=rows,
        heading=heading,
        tables=tables,
        notes=[note],
        plots=[
            Plot("Speed", "", "tokens/s", [one.name for one in contenders], {"": _speeds(rows)}),
        ],
        extra=extra,
        failed=f"another text than plain decoding's: {', '.join(different)}"
        if different and must_agree
        else None,
    )


def _answer(engine: Any, group: list[list[int]], params: SamplingParams, turn: Turn) -> None:
    import time

    began = time.perf_counter()
    turn.outputs += engine.generate(group, params)
    turn.seconds += time.perf_counter() - began


def _row(
    contender: Contender,
    turns: dict[str, list[Turn]],
    chosen: Sequence[int],
    concurrency: int,
) -> dict[str, Any]:
    own, plain = turns[contender.name], turns[PLAIN.name]
    totals = [one.totals(chosen) for one in own]
    first = totals[0]
    speeds = _speeds_of(own, chosen, concurrency)
    ratios = [
        ours / theirs if theirs else 0.0
        for ours, theirs in zip(speeds, _speeds_of(plain, chosen, concurrency), strict=True)
    ]
    outputs = [one.outputs[place] for one in own for place in chosen]
    lossless = all(one.lossless for one in outputs)
    same: bool | None = None
    if contender != PLAIN and lossless:
        same = all(
            ours.outputs[place].token_ids == theirs.outputs[place].token_ids
            for ours, theirs in zip(own, plain, strict=True)
            for place in chosen
        )
    metrics = [one.metrics for one in outputs if one.metrics.completion_tokens]
    gaps = [gap for one in metrics for gap in one.inter_token_seconds]
    draft, verify, sample = (
        sum(one.time_shares[place] for one in totals) / len(totals) for place in range(3)
    )
    return {
        "name": contender.name,
        "tokens_per_second": Spread.of(speeds).as_json(),
        "vs_plain": Spread.of(ratios).as_json(),
        "acceptance_length": first.acceptance_length,
        "alpha": first.alpha,
        "alpha_per_position": first.alpha_per_position,
        "gamma_used": first.gamma,
        "draft_share": draft,
        "verify_share": verify,
        "sample_share": sample,
        "wasted": first.wasted,
        "tokens": first.tokens,
        "rounds": first.rounds,
        "drafted": first.drafted,
        "accepted": first.accepted,
        "ttft_seconds": Spread.of([one.ttft_seconds for one in metrics]).as_json(),
        "tpot_seconds": Spread.of([one.tpot_seconds for one in metrics]).as_json(),
        "inter_token_seconds": Spread.of(gaps).as_json(),
        "lossless": lossless,
        "same_text": same,
    }


def _speeds_of(turns: Sequence[Turn], chosen: Sequence[int], concurrency: int) -> list[float]:
    """Tokens a second by repetition."""
    if concurrency == 1:
        return [one.totals(chosen).tokens_per_second for one in turns]
    found = []
    for one in turns:
        tokens = sum(len(one.outputs[place].token_ids) for place in chosen)
        # A kind's share of the time is that of its tokens: batches hold several kinds.
        share = tokens / max(1, sum(len(output.token_ids) for output in one.outputs))
        found.append(tokens / (one.seconds * share) if one.seconds * share else 0.0)
    return found


def _table(rows: list[dict[str, Any]], title: str | None) -> Any:
    return table(
        ("", *COLUMNS),
        [
            (
                row["name"],
                f"{row['tokens_per_second']['median']:.1f}",
                f"{row['vs_plain']['median']:.2f}",
                f"{row['acceptance_length']:.2f}",
                f"{row['alpha']:.2f}" if row["drafted"] else "–",
                f"{row['gamma_used']:.1f}" if row["drafted"] else "0",
                f"{row['draft_share']:.0%}",
                f"{row['verify_share']:.0%}",
                f"{row['sample_share']:.0%}",
                f"{row['wasted']:.0%}" if row["drafted"] else "–",
            )
            for row in rows
        ],
        title=title,
    )


def _same(rows: list[dict[str, Any]]) -> str:
    told = [row["same_text"] for row in rows if row["name"] != PLAIN.name]
    if False in told:
        return "NO"
    if None in told:
        return "not compared (lossy)"
    return "yes" if told else "–"


def _speeds(rows: list[dict[str, Any]]) -> list[float]:
    return [float(row["tokens_per_second"]["median"]) for row in rows]
