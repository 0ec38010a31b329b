"""scripts/gpu_check.sh as far as it goes without a GPU, and its table from made-up figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "gpu"


@pytest.fixture
def gpu_scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of scripts/gpu by name."""
    monkeypatch.syspath_prepend(str(GPU))

    def load(name: str) -> ModuleType:
        sys.modules.pop(name, None)
        return __import__(name)

    return load


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments],
        capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = call("--out", str(tmp_path))
    assert done.returncode == 4
    assert "no GPU" in done.stderr
    assert "nothing was run" in done.stderr
    assert "no GPU" in json.loads((tmp_path / "report.json").read_text())["error"]
    assert "Nothing was run." in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--stages", "everything"], "invalid choice: 'everything'"),
        (["--limit", "0"], "expected more than 0 seconds"),
        (["--cutlass", "/nowhere"], "expected include/cutlass/cutlass.h in /nowhere"),
        (["--quick"], "unrecognized arguments"),
    ],
)
def test_arguments_are_checked(arguments: list[str], part: str, tmp_path: Path) -> None:
    done = call("--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_fails_stops_no_other(gpu_scripts: Any, tmp_path: Path) -> None:
    stages = gpu_scripts("stages")
    context = stages.Context(root=ROOT, out=tmp_path, build=tmp_path, gpu={"architecture": 90})
    child = tmp_path / "child"

    def command(text: str) -> Any:
        return lambda c: c.run([sys.executable, "-c", text]) or "done"

    def refuse(_: Any) -> str:
        raise stages.Unavailable("expected a tool")

    def write(c: Any) -> str:
        (c.out / "found.json").write_text("[1")
        return ""

    hangs = f"import subprocess,time; subprocess.Popen(['sleep', '60']); open({str(child)!r},'w'); "
    outcomes = [
        stages.run_stage(stage, context)
        for stage in (
            stages.Stage("fails", 20, command("print('why'); raise SystemExit(7)")),
            stages.Stage("hangs", 1.5, command(hangs + "time.sleep(60)")),
            stages.Stage("lacks", 20, refuse),
            stages.Stage("raises", 20, lambda _: 1 // 0),
            stages.Stage("cut", 20, write, "found.json"),
            stages.Stage("works", 20, command("import os; assert os.environ['HF_HUB_OFFLINE']")),
        )
    ]
    states = [one.state for one in outcomes]
    assert states == ["failed", "timed out", "not available", "failed", "failed", "passed"]
    assert "returned 7: why" in outcomes[0].detail
    assert outcomes[1].seconds < 10
    assert "JSON is cut off" in outcomes[4].detail
    main = _load_main()
    assert main.exit_code(outcomes) == 1
    assert main.exit_code([outcomes[2], outcomes[5]]) == 3
    assert main.exit_code([outcomes[5]]) == 0


def _load_main() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_main", GPU / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_has_a_limit(gpu_scripts: Any, tmp_path: Path) -> None:
    stages = gpu_scripts("stages")
    context = stages.Context(root=ROOT, out=tmp_path, build=tmp_path, gpu={}, limit=5.0)
    sleep = stages.Stage("sleep", 60, lambda c: c.run(["sleep", "30"]))
    begin = time.monotonic()
    assert [stages.run_stage(sleep, context).state for _ in range(2)] == ["timed out"] * 2
    assert time.monotonic() - begin < 10
    assert sum(stage.limit for stage in stages.STAGES.values()) <= 600


def test_gpus_it_builds_for(gpu_scripts: Any) -> None:
    stages = gpu_scripts("stages")
    assert [stages.architecture_to_build(cc) for cc in (80, 86, 89, 90)] == ["80"] * 3 + ["90"]
    for other in (75, 100, 120):
        with pytest.raises(stages.Unavailable, match="compute capability"):
            stages.architecture_to_build(other)


def product(matrix: str, rows: int, us: float, **more: Any) -> dict[str, Any]:
    return {
        "model": "llama-3.1-8b", "matrix": matrix, "n": 64, "k": 64, "dtype": "bf16", "rows": rows,
        "microseconds": us, "gb_per_s": 100.0, "of_copy": 0.9, **more,
    }  # fmt: skip


def test_the_table(gpu_scripts: Any) -> None:
    report = gpu_scripts("report")
    rows = []
    for m, us in ((1, 10.0), (16, 10.5), (64, 14.0)):
        rows += [product(name, m, us) for name in report.LAYER]
    rows[0]["of_copy"] = 0.8
    rows[4]["cublas_microseconds"] = 10.0
    data = {"copy_gb_per_s": 1000.0, "products": rows, "whole": False}
    ends = {
        "shape": "llama-3.1-8b", "weight_bytes": 16e9,
        "rows": [
            {"name": "specrt plain", "tokens_per_second": 50.0, "acceptance_length": 1.0},
            {"name": "transformers generate", "tokens_per_second": 25.0},
            {"name": "specrt n-gram", "refused": "[device] expected | 'cpu'"},
        ],
    }  # fmt: skip

    def stage(name: str, state: str, data: Any = None) -> dict[str, Any]:
        return {"name": name, "state": state, "seconds": 3.2, "detail": "why", "data": data}

    text = report.render({
        "date": "2026-01-01 00:00 UTC", "commit": "abc",
        "gpu": {"name": "Made-up", "architecture": 90, "torch": "2", "cuda": "13.0"},
        "stages": [
            stage("build", "passed"), stage("products", "timed out", data),
            stage("end_to_end_8b", "not available", ends), stage("engine", "failed", [
                {"name": "two_clients", "state": "failed", "detail": "not done", "seconds": 30.0},
            ]),
        ],
    })  # fmt: skip
    assert "Made-up, compute capability 9.0" in text
    assert "Time was up" in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "timed out" in lines["products"]
    assert "1.05" in lines["llama-3.1-8b bf16: a layer at M = 16 at most 1.1 of M = 1"]
    missed = lines["llama-3.1-8b bf16: a layer at M = 64 at most 1.25 of M = 1"]
    assert "1.40" in missed
    assert "missed" in missed
    assert "80%" in lines["llama-3.1-8b bf16: every product at M = 1 at least 85% of copying"]
    assert "1.05 of cuBLAS" in lines["bf16: no product slower than cuBLAS at M up to 64"]
    assert lines["16"].count("10.5, 90%") == 4
    assert "10.5, 90%, 10.0" in lines["16"]
    assert "80%" in lines["specrt plain"]  # 50 times 16 GB a second, of 1000
    assert "0.50" in lines["transformers generate"]
    assert "expected \\" in lines["specrt n-gram"]
    assert "not done" in lines["two_clients"]
    for block in text.split("\n\n"):
        widths = {len(line) for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, block


def test_torch_baseline_is_transformers(gpu_scripts: Any) -> None:
    import torch

    baseline = gpu_scripts("torch_baseline")
    sizes = {"hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
             "vocab": 128, "tied": False}  # fmt: skip
    torch.manual_seed(0)
    model = baseline.random_llama(sizes, torch.device("cpu"))
    tokens = [3, 17, 90, 4, 55, 6]
    decoder = baseline.Decoder(model, 16)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].float()
        got = []
        for token in tokens:
            decoder.token.fill_(token)
            got.append(decoder.step()[0].float().clone())
    torch.testing.assert_close(torch.stack(got), want, atol=0.05, rtol=0.05)
    assert baseline.graph_tokens_per_second(model, tokens, 4) > 0
    assert baseline.generate_tokens_per_second(model, tokens, 4) > 0


def test_cublas_goes_beside(gpu_scripts: Any, tmp_path: Path) -> None:
    products = gpu_scripts("products")
    measured = {"copy_gb_per_s": 1.0, "products": [
        product("o", 1, 5.0), product("o", 3, 5.0), product("o", 1, 5.0, dtype="int8"),
    ]}  # fmt: skip
    (tmp_path / "in.json").write_text(json.dumps(measured))
    arguments = [str(tmp_path / "in.json"), str(tmp_path / "out.json")]
    assert products.main([*arguments, "--device", "cpu", "--streamed", "16384"]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["products"]
    assert [("cublas_microseconds" in row) for row in rows] == [True, True, False]


def test_end_to_end_runs_whole(gpu_scripts: Any, tmp_path: Path) -> None:
    end_to_end = gpu_scripts("end_to_end")
    to = tmp_path / "tiny.json"
    arguments = ["tiny", "--json", str(to), "--device", "cpu", "--tokens", "6", "--seconds", "500"]
    assert end_to_end.main(arguments) == 0
    rows = json.loads(to.read_text())["rows"]
    assert [row["name"] for row in rows][:3] == [
        "torch, one graph a token", "transformers generate", "specrt plain",
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert [row["lossless"] for row in rows[2:]] == [True, False, True]
