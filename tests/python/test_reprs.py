"""What an engine and its requests say of themselves."""

from __future__ import annotations

from pathlib import Path

from helpers import greedy

from specrt import Engine


def test_engine_and_handle(l2: Path) -> None:
    with Engine(l2, "ngram", policy="fixed", threads=1, max_model_len=128) as engine:
        told = f"<Engine {engine.name}: float32 on cpu, threads=1, drafter NGram, policy fixed>"
        assert repr(engine) == told
        handle = engine.submit([1, 2, 3], greedy(5))
        handle.result(60)
        assert repr(handle) == "<RequestHandle: done, 5 tokens so far>"
    assert repr(engine) == f"<Engine {engine.name}: closed>"
    with Engine(l2, threads=2, max_model_len=128) as engine:
        assert repr(engine).endswith("threads=2, no drafter>")
