"""A whole model with random weights: specrt plain, with drafts of a preset quality and with
n-grams, beside transformers' `generate` and a captured graph of torch.

    python scripts/gpu/end_to_end.py SHAPE --json FILE [--device cuda] [--seconds S] [--tokens N]

Random weights tell about speed alone: a drafter's acceptance on them means nothing, which is why
acceptance is preset where it matters. Returns 3 where specrt refuses the device by name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_baseline import generate_tokens_per_second, graph_tokens_per_second, random_llama

import specrt
from specrt import SamplingParams
from specrt.bench.random_model import SHAPES, random_model
from specrt.bench.random_model import sizes as sizes_of
from specrt.drafters import NGram, Synthetic

ALPHA = 0.8


def engine_runs() -> dict[str, dict[str, Any]]:
    """Name and options of each; all with a budget of 5 drafted tokens."""
    drafting = {"num_speculative_tokens": 5, "policy": "fixed"}
    return {
        "specrt plain": {},
        f"specrt, drafts of α = {ALPHA}": {
            "drafter": Synthetic(), "synthetic_acceptance_rate": ALPHA, **drafting,
        },
        "specrt n-gram": {"drafter": NGram(), **drafting},
    }  # fmt: skip


def specrt_row(
    path: Path, prompt: list[int], tokens: int, device: str, options: dict[str, Any]
) -> dict[str, Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begin = time.monotonic()
    with specrt.Engine(path, device=device, max_model_len=1024, max_batch_size=1,
                       **options) as engine:  # fmt: skip
        loaded = time.monotonic() - begin
        engine.generate(prompt, params)  # captures graphs, warms caches
        begin = time.monotonic()
        output = engine.generate(prompt, params)
        seconds = time.monotonic() - begin
    metrics = output.outputs[0].metrics
    return {
        "tokens_per_second": len(output.token_ids) / seconds,
        "load_seconds": loaded, "acceptance_length": metrics.acceptance_length,
        "alpha": metrics.alpha, "lossless": output.lossless,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--json", type=Path, default=Path("end_to_end.json"))
    parser.add_argument("--make", type=Path, help="only write the packed model into this folder")
    parser.add_argument("--scratch", type=Path, help="where the packed model goes: 16 GB for 8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=100.0, help="nothing is begun after them")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    if options.make:
        random_model(options.shape, options.make)
        return 0
    ends = time.monotonic() + options.seconds
    sizes = sizes_of(options.shape)
    device = torch.device(options.device)
    # A phrase over and over, so that n-grams have something to find.
    prompt = [(7 * i) % 61 + 5 for i in range(32)] * 4
    weights = (
        sizes["layers"]
        * sizes["hidden"]
        * (sizes["head_dim"] * (2 * sizes["heads"] + 2 * sizes["kv_heads"]) + 3 * sizes["ffn"])
        + sizes["vocab"] * sizes["hidden"]
    )
    report: dict[str, Any] = {"shape": options.shape, "weight_bytes": 2 * weights, "rows": []}

    def add(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        options.json.write_text(json.dumps(report, indent=1))
        print(row, flush=True)

    def try_row(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() > ends:
            add({"name": name, "skipped": "time was up"})
            return
        try:
            add({"name": name, **measure()})
        except specrt.errors.UnsupportedError as error:
            add({"name": name, "refused": str(error)})
        except Exception as error:  # the other rows go on
            traceback.print_exc()
            add({"name": name, "failed": f"{type(error).__name__}: {error}"})

    folder = Path(tempfile.mkdtemp(prefix="specrt-", dir=options.scratch))
    # Made beside the baselines, in a process of its own.
    maker = subprocess.Popen([sys.executable, __file__, options.shape, "--make", str(folder)])
    try:
        model = random_llama(sizes, device)
        for name, rate in (
            ("torch, one graph a token", graph_tokens_per_second),
            ("transformers generate", generate_tokens_per_second),
        ):
            speed = partial(rate, model, prompt, options.tokens)
            try_row(name, lambda speed=speed: {"tokens_per_second": speed()})
        speed = model = None  # gives the memory back
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if maker.wait(max(1.0, ends - time.monotonic())) != 0:
            raise RuntimeError("the random model was not made")
        path = next(folder.glob("*.specrt"))
        for name, more in engine_runs().items():
            try_row(name, partial(specrt_row, path, prompt, options.tokens, options.device, more))
    finally:
        maker.kill()
        shutil.rmtree(folder, ignore_errors=True)
    rows = report["rows"]
    if any("skipped" in row or "failed" in row for row in rows):
        return 1
    return 3 if any("refused" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
