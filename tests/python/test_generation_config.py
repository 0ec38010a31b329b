"""Requests without sampling_params follow the model's own generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from specrt import Engine, InvalidArgumentError, SamplingParams

SMALL = {"max_batch_size": 2, "max_num_batched_tokens": 64, "threads": 1}


def model_with(path: Path, **config: Any) -> Path:
    tiny.tiny_llama(path)
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_sampling_counts_only_with_do_sample(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.2, "max_new_tokens": 9,
    }  # fmt: skip
    with Engine(model_with(tmp_path / "sampled", do_sample=True, **values), **SMALL) as engine:
        assert engine.default_sampling_params == SamplingParams(
            max_tokens=9, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.2
        )
        first = engine.generate([1, 2, 3])
        assert len(first.token_ids) == 9
        assert len({tuple(engine.generate([1, 2, 3]).token_ids) for _ in range(8)}) > 1
    with Engine(model_with(tmp_path / "greedy", **values), **SMALL) as engine:
        assert engine.default_sampling_params == SamplingParams(
            max_tokens=9, repetition_penalty=1.2
        )
        assert engine.generate([1, 2, 3]).token_ids == engine.generate([1, 2, 3]).token_ids


def test_given_parameters_stand_alone(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", do_sample=True, temperature=5.0, repetition_penalty=9.0)
    plain = tiny.tiny_llama(tmp_path / "plain")
    (plain / "generation_config.json").unlink(missing_ok=True)
    params = SamplingParams(max_tokens=20)
    with Engine(model, **SMALL) as one, Engine(plain, **SMALL) as other:
        assert one.generate([5, 6], params).token_ids == other.generate([5, 6], params).token_ids
        assert other.default_sampling_params == SamplingParams()


def test_values_out_of_range_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[repetition_penalty\]"):
        Engine(model_with(tmp_path / "model", repetition_penalty=-1.0), **SMALL)
