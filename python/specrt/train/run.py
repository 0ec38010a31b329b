"""A training from end to end: data, favourites, steps, files, and what it came to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.prompts import BenchPrompt, builtin_prompts
from ..errors import LoadError
from .collect import DataOptions, collect
from .evaluate import Measured, as_json, as_table, evaluate
from .favourites import add_favourites
from .kinds import Kind
from .loop import LoopOptions, Point, run_loop
from .parts import stored
from .plot import plot_history
from .shards import write_atomically
from .target import TargetTables

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report", "TrainOptions", "read_held_out", "train"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """A training's frame; what is trained is a `Kind`'s affair."""

    target: Any
    """As `Engine`'s: a folder, a hub id or a .gguf file."""
    out: Path
    """Where the drafter is written."""
    data: DataOptions
    loop: LoopOptions = field(default_factory=LoopOptions)
    work: Path | None = None
    """Shards and checkpoints; None: the folder `training` in `out`."""
    dtype: str = "auto"
    """Of the target, as `Engine`'s: a head fits the precision that it was trained for best."""
    tokenizer: Any = None
    threads: int | None = None
    held_out: Path | None = None
    """Prompts to measure on: JSON lines of "prompt" and "kind"; None: the built-in forty."""
    held_out_tokens: int = 128
    """Of an answer there; 0 measures nothing."""
    temperatures: tuple[float, ...] = (0.0,)
    """At which it is measured."""


@dataclass(frozen=True)
class Report:
    """What a training came to."""

    history: list[Point]
    measured: list[Measured]
    examples: int
    learnt: int
    seconds: dict[str, float]
    """By stage, of this call."""


def read_held_out(path: Path | None) -> list[BenchPrompt]:
    """Prompts by kind. Raises LoadError with the line of one that is none."""
    if path is None:
        return builtin_prompts()
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"[{path}] cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            prompts.append(BenchPrompt(str(number), str(raw.get("kind", "all")), raw["prompt"]))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LoadError(
                f"[{path} line {number}] expected an object with a prompt, got {error!r}"
            ) from error
    if not prompts:
        raise LoadError(f"[{path}] expected at least one prompt, got none")
    return prompts


def train(kind: Kind, options: TrainOptions, console: Console) -> Report:
    """Train a drafter and write it. What is done already in `work` is not done again.

    Raises what `collect`, `run_loop` and `Engine` raise.
    """
    work = options.work or options.out / "training"
    work.mkdir(parents=True, exist_ok=True)
    # A mistake here should not wait for the end.
    prompts = read_held_out(options.held_out) if options.held_out_tokens else []
    seconds: dict[str, float] = {}

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    with TargetTables(options.target, options.dtype) as tables:
        with _bar(console, "running the target") as bar:
            collected = collect(
                options.target,
                tables,
                kind.features(tables),
                options.data,
                work / "data",
                dtype=options.dtype,
                tokenizer=options.tokenizer,
                threads=options.threads,
                say=say,
                told=lambda done, total, tokens: bar(done, total, f"{tokens:,} tokens"),
            )
        seconds["data"] = collected.seconds
        say(
            f"data: {collected.examples:,} texts, {collected.tokens:,} tokens, "
            f"{collected.learnt:,} of them to learn, {collected.left_out:,} records left out "
            f"({collected.seconds:.0f} s)"
        )
        started = time.monotonic()
        with _bar(console, "the target's favourites") as bar:
            add_favourites(
                collected.store,
                stored(tables.lm_head()),
                lambda done, total: bar(done, total, ""),
            )
        examples = list(collected.store.examples())
        trainer = kind.make(tables, examples, options.loop.seed, say)
        seconds["favourites"] = time.monotonic() - started
        identity = {"kind": kind.name, **kind.identity()}
        identity["data"] = collected.learnt
        started = time.monotonic()
        with _bar(console, "training") as bar:

            def told(done: float, point: Point) -> None:
                right = " ".join(f"{one:.3f}" for one in point.right)
                bar(done, 1.0, f"step {point.step}, loss {point.loss:.3f}, right {right}")

            history = run_loop(
                trainer,
                examples,
                kind.sizes(examples),
                options.loop,
                work,
                identity=identity,
                say=say,
                told=told,
            )
        seconds["training"] = time.monotonic() - started
        last = history[-1]
        say(f"training: {last.step} steps, loss {last.loss:.3f} ({seconds['training']:.0f} s)")
        kind.write(trainer, tables, options.out)
        plot_history(
            history, options.out / "training.png", f"{kind.name} for {Path(tables.name).name}"
        )
    measured = _measure(kind, options, prompts, seconds, console)
    report = Report(history, measured, collected.examples, collected.learnt, seconds)
    told_all = {
        "measured": as_json(measured),
        "examples": report.examples,
        "learnt_tokens": report.learnt,
        "steps": last.step,
        "loss": last.loss,
        "seconds": {name: round(one, 1) for name, one in seconds.items()},
    }
    write_atomically(options.out / "metrics.json", json.dumps(told_all, indent=1) + "\n")
    return report


def _measure(
    kind: Kind,
    options: TrainOptions,
    prompts: Sequence[BenchPrompt],
    seconds: dict[str, float],
    console: Console,
) -> list[Measured]:
    if not prompts:
        return []
    started = time.monotonic()
    measured = evaluate(
        options.target,
        kind.drafters(options.out),
        prompts,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
        threads=options.threads,
        max_tokens=options.held_out_tokens,
        temperatures=options.temperatures,
    )
    seconds["measuring"] = time.monotonic() - started
    console.print(as_table(measured))
    return measured


@contextmanager
def _bar(console: Console, what: str) -> Iterator[Any]:
    """A function of (done, total, note): a bar on a terminal, a line now and then elsewhere."""
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, transient=True,
        ) as progress:  # fmt: skip
            task = progress.add_task(what, total=None, note="")
            yield lambda done, total, note: progress.update(
                task, completed=done, total=total, note=note
            )
        return
    last = time.monotonic()

    def line(done: float, total: float, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 30.0:
            last = time.monotonic()
            console.print(f"{what}: {done / total:.0%} {note}", highlight=False, soft_wrap=True)

    yield line
