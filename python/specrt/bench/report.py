"""How results are shown: a table on the terminal, a JSON file, a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .._core import __version__
from ..errors import InvalidArgumentError
from .plots import Plot, save_plots

__all__ = ["Report", "Ticks", "check_outputs", "emit", "progress", "table"]

VERSION = 1
"""Of the JSON; it changes when a key does."""


@dataclass
class Report:
    """What one benchmark found."""

    benchmark: str
    target: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    heading: str = ""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of the JSON."""
    failed: str | None = None
    """A sentence where something must never happen and did; the command fails then."""

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "version": VERSION,
            "specrt": __version__,
            "machine": {
                "processor": _processor(),
                "cores": len(os.sched_getaffinity(0)),
                "system": platform.platform(),
            },
            "target": self.target,
            "settings": self.settings,
            "rows": self.rows,
            **self.extra,
        }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Before any work: that both could be written. Raises InvalidArgumentError."""
    for name, path in (("json", json_file), ("plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgumentError(f"[{name}] expected an existing folder for {path}, got none")
        if path is not None and path.is_dir():
            raise InvalidArgumentError(f"[{name}] expected a file's name, got the folder {path}")
    if plot is not None:
        if plot.suffix not in (".png", ".html"):
            raise InvalidArgumentError(f"[plot] expected a name in .png or .html, got {plot}")
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise InvalidArgumentError(
                "[plot] expected matplotlib, found none: pip install 'specrt[bench]'"
            )


def emit(report: Report, json_file: Path | None, plot: Path | None) -> None:
    """Prints the tables and writes the files."""
    # Nowhere but on a terminal does a table have to be cut.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    if report.heading:
        console.print(report.heading, markup=False, soft_wrap=True)
    for one in report.tables:
        console.print(one)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    if json_file is not None:
        text = json.dumps(report.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        save_plots(report.plots, plot, title=f"specrt-bench {report.benchmark}")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
) -> Table:
    """A plain table whose first `left` columns are names and whose others are numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.min_width = len(title or "")
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


class Ticks:
    """A bar that moves on a terminal, and nothing elsewhere."""

    def __init__(self, bar: Progress | None, task: Any) -> None:
        self._bar, self._task = bar, task

    def step(self, doing: str | None = None) -> None:
        """One more done; `doing` names what comes next."""
        if self._bar is not None:
            self._bar.advance(self._task)
            if doing is not None:
                self._bar.update(self._task, description=doing)


@contextmanager
def progress(total: int, doing: str) -> Iterator[Ticks]:
    """For work of `total` steps, on standard error."""
    if not sys.stderr.isatty():
        yield Ticks(None, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Ticks(bar, bar.add_task(doing, total=total))
