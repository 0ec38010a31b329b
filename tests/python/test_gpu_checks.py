"""The checks that scripts/gpu_check.sh makes of whole engines: here on the CPU, and on a GPU where
there is one and the build has CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))
import checks

sys.path.pop(0)


def devices() -> list[str]:
    try:
        return ["cpu", *(["cuda"] if _core.cuda_devices() else [])]
    except specrt.errors.UnsupportedError:
        return ["cpu"]


@pytest.fixture(scope="module", params=devices())
def at(request: Any, tmp_path_factory: pytest.TempPathFactory) -> checks.Setup:
    return checks.Setup(request.param, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", sorted(checks.CHECKS))
def test_check(name: str, at: checks.Setup) -> None:
    assert isinstance(checks.CHECKS[name](at), str)


def test_a_refusal_is_not_available(at: checks.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: checks.Setup) -> str:
        raise specrt.errors.UnsupportedError("[device] expected another")

    monkeypatch.setitem(checks.CHECKS, "two_clients", refuse)
    monkeypatch.setitem(checks.CHECKS, "short_draft_model", lambda _: 1 // 0)
    monkeypatch.setitem(checks.CHECKS, "memory_is_known", lambda _: "well")
    run = ["--device", at.device, "--models", str(at.folder), "--only"]
    assert checks.main([*run, "memory_is_known"]) == 0
    assert checks.main([*run, "two_clients", "memory_is_known"]) == 3
    assert checks.main([*run, "two_clients", "short_draft_model"]) == 1
