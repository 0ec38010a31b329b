"""`specrt-bench sweep`: γ against drafts of a preset quality, or against drafters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..drafters import Synthetic
from ..errors import InvalidArgumentError
from ..sampling import SamplingParams
from .plots import Plot
from .prompts import Totals
from .report import Report, Ticks, progress, table
from .stats import Spread
from .targets import PLAIN, Contender, Target, parse_drafter

__all__ = ["measure", "tau_of"]


def tau_of(alpha: float, gamma: int) -> float:
    """τ = (1 - α^(γ+1)) / (1 - α): what theory says (Leviathan et al., arXiv 2211.17192)."""
    return gamma + 1.0 if alpha == 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def measure(
    target: Target,
    *,
    gammas: Sequence[int],
    alphas: Sequence[float],
    drafters: Sequence[str],
    rounds: int,
    repeats: int,
    max_tokens: int,
    prompts: Sequence[list[int]],
) -> Report:
    """Each cell beside plain decoding, by turns, one request at a time.

    With `alphas`, drafts are free and accepted with these probabilities, and the text is not the
    target's; with `drafters`, it is theirs to draft. `rounds`: of each cell, at least.
    """
    for name, value in (("rounds", rounds), ("repeats", repeats), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidArgumentError(f"[{name}] expected at least 1, got {value}")
    if not gammas or any(one < 1 for one in gammas):
        raise InvalidArgumentError(f"[gamma] expected numbers of at least 1, got {list(gammas)}")
    for name, given in (("gamma", gammas), ("alpha", alphas), ("drafter", drafters)):
        if len(set(given)) < len(given):
            raise InvalidArgumentError(f"[{name}] expected each once, got {list(given)}")
    if any(not 0 <= one <= 1 for one in alphas):
        raise InvalidArgumentError(f"[alpha] expected numbers in [0, 1], got {list(alphas)}")
    if bool(alphas) == bool(drafters):
        raise InvalidArgumentError(
            "[sweep] expected either alphas or drafters, got both or neither"
        )
    columns: list[tuple[str, float | None, Any]] = []
    if alphas:
        columns += [(f"α={one:g}", one, Synthetic()) for one in alphas]
    columns += [(one, None, parse_drafter(one)) for one in drafters]
    rows = []
    with (
        target.engine(PLAIN, max_batch_size=1, enable_prefix_caching=False) as plain,
        progress(len(columns) * len(gammas) * repeats, "sweeping") as ticks,
    ):
        for label, alpha, drafter in columns:
            for gamma in gammas:
                options: dict[str, Any] = (
                    {} if alpha is None else {"synthetic_acceptance_rate": alpha}
                )
                contender = Contender(f"{label} γ={gamma}", drafter, "fixed", gamma)
                with ExitStack() as stack:
                    engine = stack.enter_context(
                        target.engine(
                            contender, max_batch_size=1, enable_prefix_caching=False, **options
                        )
                    )
                    cell = _cell(engine, plain, prompts, rounds, repeats, max_tokens, ticks)
                rows.append({"drafts": label, "alpha_set": alpha, "gamma": gamma, **cell})
    if alphas:
        for row in rows:
            theory = tau_of(row["alpha_set"], row["gamma"])
            row["tau_theory"] = theory
            row["speedup_by_tau"] = row["vs_plain"]["median"] / row["acceptance_length"]
    return Report(
        benchmark="sweep",
        target=target.describe(),
        settings={
            "gammas": list(gammas),
            "alphas": list(alphas),
            "drafters": list(drafters),
            "rounds": rounds,
            "repeats": repeats,
            "max_tokens": max_tokens,
        },
        rows=rows,
        heading=f"target  {target}    "
        + ("synthetic acceptance: not the model's text" if alphas else "fixed γ, by drafter"),
        tables=_tables(rows, [one[0] for one in columns], gammas, bool(alphas)),
        notes=[_note(rows, bool(alphas))],
        plots=_plots(rows, [one[0] for one in columns], gammas, bool(alphas)),
    )


def _cell(
    engine: Any,
    plain: Any,
    prompts: Sequence[list[int]],
    rounds: int,
    repeats: int,
    max_tokens: int,
    ticks: Ticks,
) -> dict[str, Any]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    ratios, speeds = [], []
    metrics = []
    same: bool | None = True
    for turn in range(repeats):
        wanted, place = math.ceil(rounds / repeats), turn
        ours: list[Any] = []
        theirs: list[Any] = []
        while wanted > 0:
            prompt = prompts[place % len(prompts)]
            # Another seed each time: it decides which drafts a preset rate accepts.
            seeded = dataclasses.replace(params, seed=turn + repeats * place)
            order = (engine, plain) if place % 2 == 0 else (plain, engine)
            outputs = {id(one): one.generate(prompt, seeded) for one in order}
            mine, base = outputs[id(engine)], outputs[id(plain)]
            if mine.metrics.rounds == 0:
                raise _no_room(max_tokens)
            if not mine.lossless:
                same = None
            elif mine.token_ids != base.token_ids:
                same = False
            ours.append(mine.metrics)
            theirs.append(base.metrics)
            wanted -= mine.metrics.rounds
            place += 1
        here, there = Totals.of(ours), Totals.of(theirs)
        speeds.append(here.tokens_per_second)
        ratios.append(here.tokens_per_second / there.tokens_per_second)
        metrics += ours
        ticks.step()
    totals = Totals.of(metrics)
    if totals.acceptance_length == 0:
        raise _no_room(max_tokens)
    return {
        "tokens_per_second": Spread.of(speeds).as_json(),
        "vs_plain": Spread.of(ratios).as_json(),
        "acceptance_length": totals.acceptance_length,
        "alpha": totals.alpha,
        "rounds": totals.rounds,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
        "same_text": same,
    }


def _no_room(max_tokens: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"[max_tokens] expected room for at least one whole round of each γ, got {max_tokens} (and "
        "max_model_len may leave less)"
    )


def _grid(rows: list[dict[str, Any]], label: str, gammas: Sequence[int]) -> list[dict[str, Any]]:
    by_gamma = {row["gamma"]: row for row in rows if row["drafts"] == label}
    return [by_gamma[one] for one in gammas]


def _tables(
    rows: list[dict[str, Any]], labels: Sequence[str], gammas: Sequence[int], synthetic: bool
) -> list[Any]:
    heads = ["", *(f"γ={one}" for one in gammas)]

    def cells(show: Any) -> list[list[str]]:
        return [[label, *(show(row) for row in _grid(rows, label, gammas))] for label in labels]

    speed = cells(lambda row: f"{row['vs_plain']['median']:.2f}")
    if synthetic:
        tau = cells(lambda row: f"{row['acceptance_length']:.2f} ({row['tau_theory']:.2f})")
        title = "τ (and what theory says)"
    else:
        tau = cells(lambda row: f"{row['acceptance_length']:.2f}, α {row['alpha']:.2f}")
        title = "τ and α"
    return [
        table(heads, speed, title="speed by plain decoding's"),
        table(heads, tau, title=title),
    ]


def _note(rows: list[dict[str, Any]], synthetic: bool) -> str:
    fewest = min(row["rounds"] for row in rows)
    note = f"at least {fewest} rounds a cell"
    if synthetic:
        worst = max(abs(row["acceptance_length"] / row["tau_theory"] - 1) for row in rows)
        least = min(row["speedup_by_tau"] for row in rows)
        note += f"; τ off theory by {worst:.1%} at most; speed by τ at least {least:.2f}"
    return note


def _plots(
    rows: list[dict[str, Any]], labels: Sequence[str], gammas: Sequence[int], synthetic: bool
) -> list[Plot]:
    def lines(value: Any) -> dict[str, list[float]]:
        return {
            label: [float(value(row)) for row in _grid(rows, label, gammas)] for label in labels
        }

    speed = lines(lambda row: row["vs_plain"]["median"])
    tau = lines(lambda row: row["acceptance_length"])
    theory = lines(lambda row: row["tau_theory"]) if synthetic else {}
    return [
        Plot("Speed by plain decoding's", "γ", "", list(gammas), speed, level=1.0),
        Plot("τ, and dashed what theory says", "γ", "tokens a round", list(gammas), tau, theory),
    ]
