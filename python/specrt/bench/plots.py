"""Plots of results, with matplotlib (the extra `bench`): one picture, or a page with drawings."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Plot", "save_plots"]


@dataclass(frozen=True)
class Plot:
    """Lines over one axis, or bars where `x` are names."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float] | Sequence[str]
    lines: Mapping[str, Sequence[float]]
    dashed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What theory says, in the colour of the line of the same name."""
    log_x: bool = False
    level: float | None = None
    """A horizontal line, of plain decoding say."""


def save_plots(plots: Sequence[Plot], path: Path, *, title: str) -> None:
    """A .png with all plots one below the other, or an .html that needs no network."""
    from matplotlib.figure import Figure

    if path.suffix == ".png":
        figure = Figure(figsize=(8, 4.5 * len(plots)), layout="constrained")
        for plot, axes in zip(plots, _axes(figure, len(plots)), strict=True):
            _draw(plot, axes)
        figure.savefig(path, dpi=120)
        return
    drawings = []
    for plot in plots:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        _draw(plot, figure.subplots())
        text = io.StringIO()
        # Without the date and the links of its metadata, which nobody needs.
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=no_metadata)
        drawings.append(text.getvalue()[text.getvalue().index("<svg") :])
    style = (
        "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:60rem}svg{max-width:100%}"
    )
    name = html.escape(title)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{style}</style><h1>{name}</h1>{''.join(drawings)}</html>\n",
        encoding="utf-8",
    )


def _axes(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _draw(plot: Plot, axes: Any) -> None:
    if plot.x and isinstance(plot.x[0], str):
        width = 0.8 / max(1, len(plot.lines))
        for place, (name, values) in enumerate(plot.lines.items()):
            at = [i + (place - (len(plot.lines) - 1) / 2) * width for i in range(len(plot.x))]
            axes.bar(at, values, width, label=name)
        axes.set_xticks(range(len(plot.x)), plot.x, rotation=15, ha="right")
    else:
        for name, values in plot.lines.items():
            [drawn] = axes.plot(plot.x, values, marker="o", label=name)
            if name in plot.dashed:
                axes.plot(plot.x, plot.dashed[name], linestyle="--", color=drawn.get_color())
        if plot.log_x:
            axes.set_xscale("log", base=2)
            axes.set_xticks(plot.x, [str(one) for one in plot.x])
    if plot.level is not None:
        axes.axhline(plot.level, color="0.6", linewidth=1)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(plot.lines) > 1:
        axes.legend(fontsize="small")
