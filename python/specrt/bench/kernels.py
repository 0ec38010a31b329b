"""`specrt-bench kernels`: what a pass of many rows costs against a pass of one."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drafters import Drafter
from ..errors import InvalidArgumentError, UnsupportedError
from ..sampling import SamplingParams
from .plots import Plot
from .report import Report, progress, table
from .targets import Contender, Target

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Noise", "find_native", "measure", "run_native", "time_rounds"]


class Noise(Drafter):
    """A chain that is hardly ever right: it makes passes of a given number of rows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self.rows = 1

    def propose(self, tokens: list[int], budget: int) -> Any:
        from .._core import DraftTree

        nodes = range(min(budget, self.rows - 1))
        return DraftTree.chain([(7919 * (len(tokens) + node) + 3) % self._vocab for node in nodes])

    def observe(self, committed: list[int]) -> None:
        pass


def measure(
    target: Target, *, rows: Sequence[int], context: int, passes: int, repeats: int
) -> Report:
    """Through the package: rounds of one sequence, whose drafts fill the pass to so many rows.

    Row counts take turns, so that all of them meet the same machine. Times are of the pass alone,
    and of a whole round.
    """
    if not rows or any(not 1 <= one <= 256 for one in rows):
        raise InvalidArgumentError(f"[rows] expected numbers in 1 to 256, got {list(rows)}")
    for name, value in (("context", context), ("passes", passes), ("repeats", repeats)):
        if value < 1:
            raise InvalidArgumentError(f"[{name}] expected at least 1, got {value}")
    counts = sorted({1, *rows})
    noise = Noise(target.vocab_size)
    contender = Contender("rows", noise, "fixed", max(1, counts[-1] - 1))
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    prompt = target.random_prompts(1, context)[0]
    limit = context + 2 * passes + counts[-1] + 2
    with (
        target.engine(contender, max_batch_size=1, max_model_len=limit) as engine,
        progress(len(counts) * (repeats + 1), "timing passes") as ticks,
    ):
        for turn in range(repeats + 1):
            for count in counts:
                noise.rows = count
                each = time_rounds(engine, prompt, count, passes)
                if turn > 0:  # the first warms up, and leaves the prompt in the prefix cache
                    passed, whole = zip(*each, strict=True)
                    times[count].append((statistics.median(passed), statistics.median(whole)))
                ticks.step()
    return _report(target, times, {"context": context, "passes": passes, "repeats": repeats})


def time_rounds(
    engine: Engine, prompt: list[int], rows: int, passes: int
) -> list[tuple[float, float]]:
    """Seconds of passes, and of rounds with all that is around them, for an engine of `Noise`,
    whose `rows` are as many.
    """
    # A draft is no deeper than what is still to come, so there is always that much, also where
    # something of it happens to be right.
    tokens = 2 * passes + rows + 1
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: list[tuple[float, float]] = []
    stream = engine.stream(prompt, params)
    next(stream)
    began = time.perf_counter()
    for _ in stream:
        whole = time.perf_counter() - began
        with engine._scheduler.between_rounds() as decoder:
            in_pass, _, verify, _ = decoder.last_times
        if in_pass == rows:
            found.append((verify, whole))
        if len(found) == passes:
            break
        began = time.perf_counter()
    stream.close()
    return found


def _report(
    target: Target, times: dict[int, list[tuple[float, float]]], settings: dict[str, Any]
) -> Report:
    found = []
    for count, each in times.items():
        passes = [one[0] for one in each]
        rounds = [one[1] for one in each]
        base = times[1]
        found.append(
            {
                "rows": count,
                "pass_seconds": statistics.median(passes),
                "round_seconds": statistics.median(rounds),
                "by_one_row": statistics.median(
                    one[0] / other[0] for one, other in zip(each, base, strict=True)
                ),
            }
        )
    shown = [
        [
            str(row["rows"]),
            f"{1e3 * row['pass_seconds']:.2f} ms",
            f"{row['by_one_row']:.2f}",
            f"{1e3 * row['round_seconds']:.2f} ms",
        ]
        for row in found
    ]
    return Report(
        benchmark="kernels",
        target=target.describe(),
        settings={"source": "package", **settings},
        rows=found,
        heading=f"target  {target}    context {settings['context']}",
        tables=[table(["rows", "pass", "by one row's", "round"], shown)],
        plots=[_plot(found)],
    )


def _plot(rows: list[dict[str, Any]]) -> Plot:
    return Plot(
        "Cost of a pass by one row's",
        "rows",
        "",
        [int(row["rows"]) for row in rows],
        {"": [float(row["by_one_row"]) for row in rows]},
        log_x=True,
        level=1.0,
    )


def find_native() -> Path | None:
    """The native benchmark (-DSPECRT_BENCH=ON) where the package runs out of its sources."""
    import specrt

    root = Path(specrt.__file__).resolve().parents[2]
    built = sorted(root.glob("build/*/bench/bench_forward"), key=lambda one: one.stat().st_mtime)
    return built[-1] if built else None


_LINE = re.compile(
    r"\S+ (?P<isa>\S+)\s+(?P<dtype>\S+)\s+\d+ threads, context \d+: "
    r"t\(1\) (?P<one>[\d.]+) ms, (?P<reached>[\d.]+) GB/s of (?P<bandwidth>[\d.]+)"
)
_RATIO = re.compile(r"(\d+): ([\d.]+)")


def run_native(
    program: Path,
    *,
    shape: str,
    dtypes: Sequence[str],
    rows: Sequence[int],
    context: int,
    repeats: int,
    threads: int,
) -> Report:
    """The native benchmark's own passes, over random weights of a known shape."""
    counts = sorted({1, *rows})
    command = [str(program), "--model", shape, "--dtype", ",".join(dtypes)]
    command += ["--rows", ",".join(map(str, counts)), "--context", str(context)]
    command += ["--repeat", str(repeats), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = []
    shown = []
    for line in done.stdout.splitlines():
        head = _LINE.match(line)
        if head is None:
            continue
        one = float(head["one"]) / 1e3
        ratios = {1: 1.0}
        ratios |= {int(m): float(r) for m, r in _RATIO.findall(line.split("t(M)/t(1):")[1])}
        for count, ratio in ratios.items():
            found.append(
                {
                    "dtype": head["dtype"],
                    "cpu_isa": head["isa"],
                    "rows": count,
                    "pass_seconds": one * ratio,
                    "by_one_row": ratio,
                }
            )
        shown.append(
            [
                head["dtype"],
                head["isa"],
                f"{1e3 * one:.2f} ms",
                f"{head['reached']} of {head['bandwidth']} GB/s",
                *(f"{ratios[count]:.2f}" for count in counts[1:]),
            ]
        )
    if done.returncode != 0 or not found:
        raise UnsupportedError(
            f"[native] expected results of {program}, got exit status {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-300:]}"
        )
    return Report(
        benchmark="kernels",
        target={"model": shape, "dtype": None, "cpu_isa": None, "threads": threads},
        settings={"source": "native", "context": context, "passes": 1, "repeats": repeats},
        rows=found,
        heading=f"target  {shape}, random weights  {threads} threads    context {context}",
        tables=[
            table(
                ["", "", "one row", "reading", *(f"{one} rows" for one in counts[1:])],
                shown,
                left=2,
            )
        ],
        notes=[
            "a pass by one row's; reading: weights a second of one row's pass, and of a plain read"
        ],
        plots=[
            Plot(
                "Cost of a pass by one row's",
                "rows",
                "",
                counts,
                _by_kind(found),
                log_x=True,
                level=1.0,
            )
        ],
    )


def _by_kind(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    lines: dict[str, list[float]] = {}
    for row in found:
        lines.setdefault(f"{row['dtype']} {row['cpu_isa']}", []).append(row["by_one_row"])
    return lines
