"""What scripts/gpu_check.sh runs; see there."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import stages
from report import render
from stages import Context, Outcome, find_gpu, run_stage

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 4


def exit_code(outcomes: Sequence[Outcome]) -> int:
    states = {one.state for one in outcomes}
    if states & {"failed", "timed out"}:
        return 1
    return 0 if states == {"passed"} else 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="The whole check on a GPU, offline, in under 8 minutes."
    )
    known = stages.STAGES
    parser.add_argument(
        "--stages", nargs="+", choices=list(known), default=list(known), metavar="NAME",
        help=f"of {', '.join(known)}; without `build`, what an earlier call built",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--cutlass", type=Path, help="a folder that has include/cutlass")
    parser.add_argument("--limit", type=float, default=470.0, help="seconds for all stages")
    options = parser.parse_args(arguments)
    if options.limit <= 0:
        parser.error(f"--limit: expected more than 0 seconds, got {options.limit}")
    if options.cutlass and not (options.cutlass / "include/cutlass/cutlass.h").exists():
        parser.error(f"--cutlass: expected include/cutlass/cutlass.h in {options.cutlass}")
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "python": platform.python_version(),
        "stages": [],
    }
    try:
        gpu = find_gpu()
    except RuntimeError as error:
        report["error"] = f"no GPU: {error}"
        _write(options.out, report)
        print(f"gpu_check: {report['error']}; nothing was run", file=sys.stderr)
        return NO_GPU
    report["gpu"] = gpu
    context = Context(
        root=ROOT, out=options.out.resolve(), build=options.build_dir.resolve(), gpu=gpu,
        cutlass=options.cutlass, limit=options.limit,
    )  # fmt: skip
    outcomes = []
    for name in known:
        if name not in options.stages:
            continue
        print(f"=== {name}", flush=True)
        outcomes.append(outcome := run_stage(known[name], context))
        print(f"=== {name}: {outcome.state}, {outcome.seconds:.0f} s  {outcome.detail}", flush=True)
        report["stages"] = [vars(one) for one in outcomes]
        _write(options.out, report)
    print((options.out / "report.md").read_text())
    return exit_code(outcomes)


def _write(out: Path, report: dict[str, object]) -> None:
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(render(report))


def _commit() -> str:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return git.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
