"""The table of a check on a GPU, out of its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What the kernels are meant to reach; said in the table, and no stage fails for it.
VERIFY_16 = 1.1
VERIFY_64 = 1.25
OF_COPY = 0.85
LAYER = ("qkv", "o", "gate_up", "down")


def render(report: Mapping[str, Any]) -> str:
    """Markdown. What is missing is left out; a stage that did not pass says so."""
    lines = ["# specrt on a GPU", ""]
    gpu = report.get("gpu")
    if gpu:
        lines.append(
            f"{gpu['name']}, compute capability {gpu['architecture'] / 10}, driver "
            f"{gpu.get('driver', 'unknown')}, torch {gpu['torch']} (CUDA {gpu['cuda']})"
        )
    lines += [f"{report['date']}, commit {report['commit']}", ""]
    if report.get("error"):
        return "\n".join([*lines, f"{report['error']}. Nothing was run.", ""])
    stages = report["stages"]
    lines += table(
        ("stage", "", "s", ""),
        [(s["name"], s["state"], f"{s['seconds']:.0f}", s["detail"]) for s in stages],
    )
    data = {stage["name"]: stage.get("data") for stage in stages}
    if data.get("products"):
        lines += _products(data["products"])
    for stage in stages:
        if stage["name"].startswith("end_to_end") and stage.get("data"):
            lines += _end_to_end(stage["data"], data.get("products"))
    if data.get("engine"):
        lines += ["## Whole engines, tiny models", ""]
        lines += table(
            ("check", "", ""), [(c["name"], c["state"], c["detail"]) for c in data["engine"]]
        )
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Of Markdown, its columns padded."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return [*lines, ""]


def layer_seconds(rows: Sequence[Mapping[str, Any]], model: str, dtype: str) -> dict[int, float]:
    """For each number of rows, the four products of a layer, where all were measured."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        if (row["model"], row["dtype"]) == (model, dtype) and row["matrix"] in LAYER:
            sums.setdefault(row["rows"], []).append(row["microseconds"] * 1e-6)
    return {m: sum(times) for m, times in sums.items() if len(times) == len(LAYER)}


def targets(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, bool]]:
    """What was aimed at, what came, and whether that is enough."""
    found = []
    for model, dtype in sorted({(row["model"], row["dtype"]) for row in rows}):
        seconds = layer_seconds(rows, model, dtype)
        for m, most in ((16, VERIFY_16), (64, VERIFY_64)):
            if 1 in seconds and m in seconds:
                ratio = seconds[m] / seconds[1]
                what = f"{model} {dtype}: a layer at M = {m} at most {most} of M = 1"
                found.append((what, f"{ratio:.2f}", ratio <= most))
    shares = [
        row["of_copy"]
        for row in rows
        if row["model"] == "llama-3.1-8b" and row["dtype"] == "bf16" and row["rows"] == 1
    ]
    if shares:
        what = f"llama-3.1-8b bf16: every product at M = 1 at least {OF_COPY:.0%} of copying"
        found.append((what, f"{min(shares):.0%}", min(shares) >= OF_COPY))
    beside = [
        (row["microseconds"] / row["cublas_microseconds"], row)
        for row in rows
        if row.get("cublas_microseconds") and row["rows"] <= 64
    ]
    if beside:
        worst, row = max(beside, key=lambda one: one[0])
        where = f"{row['model']} {row['matrix']}, M = {row['rows']}"
        what = "bf16: no product slower than cuBLAS at M up to 64"
        found.append((what, f"{worst:.2f} of cuBLAS's time ({where})", worst <= 1.0))
    return found


def _products(data: Mapping[str, Any]) -> list[str]:
    rows = data["products"]
    lines = ["## Products", "", f"Copying: {data['copy_gb_per_s']:.0f} GB/s, read and written."]
    if not data.get("whole", True):
        lines.append("Time was up before all of them were measured.")
    lines.append("")
    goals = [(what, got, "met" if good else "missed") for what, got, good in targets(rows)]
    lines += table(("aim", "got", ""), goals)
    for model, dtype in sorted({(row["model"], row["dtype"]) for row in rows}):
        lines += [f"### {model}, {dtype}", "", "µs, share of copying, cuBLAS's µs", ""]
        mine = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        counts = sorted({row["rows"] for row in mine})
        matrices = list(dict.fromkeys(row["matrix"] for row in mine))
        at = {(row["matrix"], row["rows"]): row for row in mine}
        body = []
        for m in counts:
            cells = [str(m)]
            for matrix in matrices:
                row = at.get((matrix, m))
                cells.append("–" if row is None else _cell(row))
            body.append(cells)
        lines += table(("M", *matrices), body)
    return lines


def _cell(row: Mapping[str, Any]) -> str:
    cell = f"{row['microseconds']:.1f}, {row['of_copy']:.0%}"
    if row.get("cublas_microseconds"):
        cell += f", {row['cublas_microseconds']:.1f}"
    return cell


def _why(row: Mapping[str, Any]) -> str:
    return next(
        (f"{key}: {row[key]}" for key in ("refused", "skipped", "failed") if key in row), ""
    )


def _end_to_end(data: Mapping[str, Any], products: Mapping[str, Any] | None) -> list[str]:
    lines = [f"## {data['shape']}, random weights, bfloat16, one request", ""]
    measured = [row for row in data["rows"] if "tokens_per_second" in row]
    plain = next((r["tokens_per_second"] for r in measured if r["name"] == "specrt plain"), None)
    body = []
    for row in data["rows"]:
        if "tokens_per_second" not in row:
            body.append((row["name"], _why(row), "", "", ""))
            continue
        rate = row["tokens_per_second"]
        share = ""
        if products and not row.get("acceptance_length", 1.0) > 1.0:
            share = f"{rate * data['weight_bytes'] / 1e9 / products['copy_gb_per_s']:.0%}"
        length = f"{row['acceptance_length']:.2f}" if row.get("acceptance_length") else ""
        body.append((row["name"], f"{rate:.1f}", f"{rate / plain:.2f}" if plain else "", length,
                     share))  # fmt: skip
    head = ("", "tokens/s", "of specrt plain", "τ", "weights read, of copying")
    return lines + table(head, body)
