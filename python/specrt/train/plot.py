"""Loss and acceptance over a run, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UnsupportedError
from .loop import Point

__all__ = ["plot_history"]


def plot_history(history: Sequence[Point], path: Path, title: str) -> None:
    """Write a PNG. Raises UnsupportedError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            f"[plot] needs matplotlib, which the extra 'train' brings: {error}"
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    loss, right = figure.subplots(2, 1, sharex=True)
    steps = [one.step for one in history]
    loss.plot(steps, [one.loss for one in history])
    loss.set_ylabel("loss a row")
    loss.set_title(title)
    for position in range(len(history[0].right) if history else 0):
        right.plot(
            steps, [one.right[position] for one in history], label=f"position {position + 1}"
        )
    right.set_ylabel("favourite right")
    right.set_xlabel("step")
    right.set_ylim(0.0, 1.0)
    right.legend()
    for axes in (loss, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)
