"""Puts cuBLAS's times, through torch, beside bench_cuda's.

python scripts/gpu/products.py BENCH_CUDA.json OUT.json [--device cuda] [--streamed BYTES]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch_time import Captured, median_seconds


def linear_seconds(
    n: int, k: int, rows: Sequence[int], device: torch.device, streamed: int
) -> list[float]:
    """Seconds of y = x W^T in bfloat16 for each number of rows, other weights each time."""
    copies = max(2, streamed // (2 * n * k))
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02 for _ in range(copies)]
    seconds = []
    for count in rows:
        x = torch.randn(count, k, dtype=torch.bfloat16, device=device)

        def work(x: torch.Tensor = x) -> torch.Tensor:
            y = None
            for weight in weights:
                y = torch.nn.functional.linear(x, weight)
            assert y is not None
            return y

        seconds.append(median_seconds(Captured(work, device), device) / copies)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streamed", type=int, default=1 << 30, help="bytes of weights in turn")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    report: dict[str, Any] = json.loads(options.measured.read_text())
    by_matrix: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["products"]:
        if row["dtype"] == "bf16":
            by_matrix.setdefault((row["model"], row["matrix"]), []).append(row)
    options.out.write_text(json.dumps(report))
    with torch.no_grad():
        for rows in by_matrix.values():
            counts = [row["rows"] for row in rows]
            times = linear_seconds(rows[0]["n"], rows[0]["k"], counts, device, options.streamed)
            for row, seconds in zip(rows, times, strict=True):
                row["cublas_microseconds"] = seconds * 1e6
            options.out.write_text(json.dumps(report))  # as far as it came
    return 0


if __name__ == "__main__":
    sys.exit(main())
