"""`specrt-bench memory`: what target, drafter and KV cache take, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..engine import Engine
from ..errors import InvalidArgumentError
from ..planning import MemoryPlan, plan
from ..system import available_memory
from .plots import Plot
from .report import Report, table
from .targets import parse_drafter

__all__ = ["measure"]

_PARTS = (
    "target_weights",
    "target_kv_cache",
    "target_workspace",
    "drafter_weights",
    "drafter_kv_cache",
    "drafter_workspace",
    "drafter_index",
)


def measure(
    model: str,
    *,
    drafters: Sequence[str],
    dtypes: Sequence[str],
    load: bool,
    options: dict[str, Any],
) -> Report:
    """Plans for each precision and drafter, from headers alone; with `load` also what was taken."""
    rows: list[dict[str, Any]] = []
    shown = []
    room = available_memory()
    notes = [] if room is None else [f"{_mb(room)} are available here"]
    for dtype in dtypes:
        for name in ("none", *drafters):
            drafter = None if name == "none" else parse_drafter(name)
            try:
                planned = plan(model, drafter, dtype=dtype, **options)
            except InvalidArgumentError as error:
                if drafter is None:
                    raise
                notes.append(f"{dtype}, {name}: {error}")  # a self-draft no coarser, say
                continue
            taken: MemoryPlan | None = None
            if load:
                with Engine(model, drafter, dtype=dtype, **options) as engine:
                    taken = engine.memory
            rows.append(
                {
                    "dtype": dtype,
                    "drafter": name,
                    **{part: getattr(planned, part) for part in _PARTS},
                    "kv_cache_tokens": planned.kv_cache_tokens,
                    "total": planned.total,
                    "taken": None if taken is None else taken.total,
                }
            )
            shown.append(_cells(dtype, name, planned, taken))
    columns = ["dtype", "drafter", "weights", "KV cache", "workspace", "drafter's weights"]
    columns += ["KV cache", "rest", "total", "tokens in cache"] + (["taken"] if load else [])
    return Report(
        benchmark="memory",
        target={"model": model, "dtype": None, "cpu_isa": None, "threads": None},
        settings={"load": load, **options},
        rows=rows,
        heading=f"target  {os.path.basename(model.rstrip('/'))}",
        tables=[table(columns, shown, left=2)],
        notes=notes,
        plots=[
            Plot(
                "Memory",
                "",
                "MB",
                [f"{row['dtype']}, {row['drafter']}" for row in rows],
                {
                    "target": [_all_of(row, "target") / 1e6 for row in rows],
                    "drafter": [_all_of(row, "drafter") / 1e6 for row in rows],
                },
            )
        ],
    )


def _all_of(row: dict[str, Any], owner: str) -> float:
    return float(sum(row[part] for part in _PARTS if part.startswith(owner)))


def _cells(dtype: str, name: str, planned: MemoryPlan, taken: MemoryPlan | None) -> list[str]:
    cells = [dtype, name]
    cells += [_mb(getattr(planned, part)) for part in _PARTS[:5]]
    cells.append(_mb(planned.drafter_workspace + planned.drafter_index))
    cells += [_mb(planned.total), f"{planned.kv_cache_tokens:,}"]
    return cells if taken is None else [*cells, _mb(taken.total)]


def _mb(value: int) -> str:
    return f"{value / 1e6:,.1f} MB" if value else "–"
