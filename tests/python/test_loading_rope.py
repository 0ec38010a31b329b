"""Rotary frequencies are transformers' own, wherever the config states them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from test_loading import edit_config

from specrt.errors import LoadError
from specrt.loading import open_checkpoint
from specrt.loading.rope import default_inv_freq, llama3_inv_freq

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def theirs(theta: float, dim: int, **parameters: Any) -> np.ndarray:
    """What transformers computes, with torch, on this machine."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = "llama3" if parameters else "default"
    config = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    if kind == "default":
        compute = LlamaRotaryEmbedding.compute_default_rope_parameters
    else:
        compute = ROPE_INIT_FUNCTIONS[kind]
    values, scale = compute(config)
    assert scale == 1.0
    return np.asarray(values.numpy())


@pytest.mark.parametrize(
    ("theta", "dim"),
    [(10000.0, 16), (10000.0, 64), (10000.0, 128), (100000.0, 64), (500000.0, 64),
     (500000.0, 128), (1000000.0, 64)],
)  # fmt: skip
def test_released_models_bit_for_bit(theta: float, dim: int) -> None:
    """Llama 2 and 3, SmolLM2, small Qwen2: there, torch's power happens to be correctly rounded."""
    ours, want = default_inv_freq(theta, dim), theirs(theta, dim)
    assert ours.dtype == want.dtype == np.float32
    assert np.array_equal(ours, want)


@pytest.mark.parametrize("theta", [1e4, 1.5e5, 1234567.0, 1e11])
def test_as_close_as_torch_is_to_itself(theta: float) -> None:
    """Torch's power is one unit off in places that depend on the CPU; its inverse, up to two."""
    for dim in range(2, 257, 2):
        ours, want = default_inv_freq(theta, dim), theirs(theta, dim)
        assert np.abs(ours.view(np.int32) - want.view(np.int32)).max() <= 2, dim


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize(
    "change",
    [{}, {"factor": 32.0}, {"factor": 3.7, "low_freq_factor": 1.3, "high_freq_factor": 5.1},
     {"original_max_position_embeddings": 64}],
)  # fmt: skip
def test_llama3_bit_for_bit(dim: int, change: dict[str, Any]) -> None:
    parameters = {**LLAMA3, **change}
    base_differs = default_inv_freq(500000.0, dim) != theirs(500000.0, dim)
    ours = llama3_inv_freq(500000.0, dim, parameters, 131072)
    want = theirs(500000.0, dim, **parameters)
    assert np.array_equal(ours[~base_differs], want[~base_differs])


def frequencies(path: Path, **changes: Any) -> tuple[float, ...]:
    with open_checkpoint(edit_config(path, **changes)) as checkpoint:
        return checkpoint.config.rope_inv_freq


def test_theta_in_any_of_three_places(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tiny.tiny_llama(tmp_path)
    want = tuple(default_inv_freq(5e5, 16).tolist())
    nothing = {"rope_theta": ..., "rope_parameters": ..., "rope_scaling": ...}
    layouts: list[dict[str, Any]] = [
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ]
    for layout in layouts:
        assert frequencies(tmp_path, **{**nothing, **layout}) == want, layout
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        hf = model.model.rotary_emb.inv_freq.numpy()
        assert np.allclose(hf, want, rtol=3e-7, atol=0), layout


def test_no_scaling_in_any_spelling(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path)
    want = tuple(default_inv_freq(5e5, 16).tolist())
    for scaling in (None, {}, {"rope_type": "default"}, {"type": "default"}, ...):
        changes = {"rope_theta": 5e5, "rope_parameters": ..., "rope_scaling": scaling}
        assert frequencies(tmp_path, **changes) == want, scaling
        changes = {"rope_theta": 5e5, "rope_parameters": scaling, "rope_scaling": ...}
        assert frequencies(tmp_path, **changes) == want, scaling


def test_contradictions_follow_transformers_and_warn(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path)
    inner = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.warns(UserWarning, match="rope_theta is 10000 at top level"):
        got = frequencies(tmp_path, rope_theta=1e4, rope_parameters=inner)
    assert got == tuple(default_inv_freq(5e5, 16).tolist())
    other = {"rope_type": "default", "rope_theta": 2e4}
    with pytest.warns(UserWarning, match="rope_scaling is used"):
        got = frequencies(tmp_path, rope_theta=..., rope_parameters=inner, rope_scaling=other)
    assert got == tuple(default_inv_freq(2e4, 16).tolist())


@pytest.mark.parametrize("kind", ["dynamic", "su", "mrope", "proportional"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str, key: str) -> None:
    tiny.tiny_llama(tmp_path)
    changes = {"rope_theta": 1e4, "rope_parameters": ..., "rope_scaling": {key: kind, "factor": 4}}
    with pytest.raises(LoadError, match=f"rope_type.*got '{kind}'"):
        frequencies(tmp_path, **changes)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"rope_type": "llama3"}, "rope factor.*None"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0}, "low_freq_factor.*got 0"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "attention_factor": 2.0}, "'attention_factor'"),
        ({"rope_type": "default", "factor": 4.0}, "'factor'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "'mrope_section'"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta.*positive"),
        ([1.0], "rope_parameters.*object"),
    ],
)
def test_parameters_refused_by_name(tmp_path: Path, parameters: Any, says: str) -> None:
    tiny.tiny_llama(tmp_path)
    with pytest.raises(LoadError, match=says):
        frequencies(tmp_path, rope_parameters=parameters)


def test_llama3_in_a_checkpoint(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3,
            "original_max_position_embeddings": 32}  # fmt: skip
    tiny.tiny_llama(tmp_path, rope=rope)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    got = np.array(frequencies(tmp_path), np.float32)
    assert np.allclose(got, model.model.rotary_emb.inv_freq.numpy(), rtol=3e-7, atol=0)
    assert not np.allclose(got, default_inv_freq(1e4, 16))
