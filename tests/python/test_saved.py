"""`Engine.save`, and engines over what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import assert_same, greedy

import specrt
from specrt import Engine, InvalidArgumentError, LoadError, SamplingParams
from specrt.drafters import DraftModel

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 8, "threads": 1}


def test_save_and_map_again(l2: Path, tmp_path: Path) -> None:
    prompts = ["abcabc", [1, 2, 3], "x"]
    params = [greedy(40, logprobs=2), greedy(40, temperature=1.0, seed=2), greedy(5)]
    for dtype in ("float32", "bfloat16", "int8", "int4", "w8a8"):
        path = tmp_path / f"{dtype}.specrt"
        with Engine(l2, dtype=dtype, **SMALL) as engine:
            expected = engine.generate(prompts, params)
            engine.save(path)
            first = path.read_bytes()
            engine.save(path)  # over itself
            assert path.read_bytes() == first
        for isa in specrt.available_cpu_isas():
            with (
                Engine(l2, dtype=dtype, cpu_isa=isa, **SMALL) as loaded,
                Engine(path, "ngram", tokenizer=l2, cpu_isa=isa, **SMALL) as mapped,
            ):
                assert mapped.dtype == dtype
                wanted = loaded.generate(prompts, params)
                assert_same(mapped.generate(prompts, params), wanted, (dtype, isa))
        with Engine(path, DraftModel(model=path), tokenizer=l2, **SMALL) as both:
            assert_same(both.generate(prompts, params), expected, "drafts for itself")
        with Engine(path, **SMALL) as bare:
            assert bare.generate([1, 2, 3], params[1]).token_ids == expected[1].token_ids


def test_dtypes_of_saved_files(l2: Path, tmp_path: Path) -> None:
    for dtype, other in (("int8", "w8a8"), ("int4", "int8"), ("w8a8", "bf16")):
        path = tmp_path / f"{dtype}.specrt"
        with Engine(l2, dtype=dtype, **SMALL) as engine:
            engine.save(path)
            wanted = engine.memory
        with Engine(path, dtype=dtype, **SMALL) as engine:
            assert (engine.dtype, engine.memory) == (dtype, wanted)
        with pytest.raises(LoadError, match=f"expected dtype {other}, got a file of {dtype}"):
            Engine(path, dtype=other, **SMALL)


def test_saved_file_keeps_end_tokens(tmp_path: Path) -> None:
    model = tiny.tiny_llama(tmp_path / "eos", vocab=64, eos_token_id=[5, 9, 11, 30])
    params = SamplingParams(max_tokens=100, temperature=2.0, seed=1)
    with Engine(model, **SMALL) as engine:
        expected = engine.generate([1], params)
        engine.save(tmp_path / "eos.specrt")
    assert expected.finish_reason == "stop"
    with Engine(tmp_path / "eos.specrt", **SMALL) as engine:
        assert_same([engine.generate([1], params)], [expected], "saved")


def test_save_refuses(l2: Path, tmp_path: Path) -> None:
    with Engine(l2, **SMALL) as engine:
        with pytest.raises(InvalidArgumentError, match=r"\.specrt"):
            engine.save(tmp_path / "model.bin")
        with pytest.raises(LoadError):
            engine.save(tmp_path / "no" / "such" / "folder.specrt")
        path = tmp_path / "l2.specrt"
        engine.save(path)
    for dtype in ("bfloat16", "bf16"):
        with pytest.raises(LoadError, match="float32"):
            Engine(path, dtype=dtype, **SMALL)
    data = path.read_bytes()
    for size in (0, 10, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(LoadError):
            Engine(path, **SMALL)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["l2.specrt"]


def test_plan_of_a_saved_file(l2: Path, tmp_path: Path) -> None:
    path = tmp_path / "l2.specrt"
    with Engine(l2, **SMALL) as engine:
        engine.save(path)
        assert specrt.plan(path, max_model_len=160, max_batch_size=8) == engine.memory


@pytest.mark.parametrize("name", ["x.bin", "a\0b.specrt", b"x.specrt", ""])
def test_names_of_saved_files(l2: Path, tmp_path: Path, name: Any) -> None:
    with Engine(l2, **SMALL) as engine, pytest.raises(InvalidArgumentError, match=r"\[path\]"):
        engine.save(name)
