"""A checkpoint's own integers in a model of the same precision: kept, not rounded again.

The tiny models' output heads lie on an int8 grid, so that what they hold in int4 and in bfloat16 is
the same to the last bit, and so is what they say.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import assert_same, greedy
from test_gguf import converted
from test_gguf import write as write_gguf
from test_loading import edit_config, same, values
from test_quantised import FORMATS, changed, edit, stored_part, write

import specrt
from specrt import Engine, LoadError, RequestOutput, loaded
from specrt.loading import Checkpoint, open_checkpoint, quantised
from specrt.loading.codes import Codes
from specrt.loading.source import as_float32

PROMPT = [5, 6, 7, 5, 6, 7, 5, 90, 2]
LINEAR = (".q", ".k", ".v", ".o", ".gate", ".up", ".down")
INT4 = [
    "gptq-32", "gptq-64", "gptq-128", "gptq--1", "gptq-asym",
    "awq-32", "awq-64", "awq-128", "ct-int4",
]  # fmt: skip
PER_TOKEN = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
}  # fmt: skip


def effective(codes: Codes) -> np.ndarray:
    """The bfloat16 weights that the core makes of these, as float32."""
    values = codes.codes.astype(np.float64)
    if codes.precision == "int8":
        weights = codes.scales[:, None].astype(np.float64) * values
    else:
        assert codes.minima is not None
        columns = values.shape[1]
        scales, minima = (
            np.repeat(one.astype(np.float64), 32, axis=1)[:, :columns]
            for one in (codes.scales, codes.minima)
        )
        weights = scales * (values + minima) if codes.zero_points else scales * values + minima
    bits = quantised.to_bfloat16(np.ascontiguousarray(weights.astype(np.float32)))
    return as_float32(bits)


def check_codes(checkpoint: Checkpoint, precision: str) -> None:
    """Every linear layer has codes, and they stand for exactly what its values are."""
    count = 0
    for name, array in values(checkpoint).items():
        codes = checkpoint.codes(name, precision)
        if not name.endswith(LINEAR):
            assert codes is None, name
            continue
        assert codes is not None, name
        want = as_float32(quantised.to_bfloat16(np.ascontiguousarray(array)))
        assert np.array_equal(effective(codes), want), name
        count += 1
    assert count == 14


def head_on_a_grid(*paths: Path) -> None:
    """Makes lm_head whole multiples of 2^-6 with 127 of them in every row."""
    from safetensors.torch import load_file, save_file

    for path in paths:
        state = load_file(path / "model.safetensors")
        head = state["lm_head.weight"]
        whole = torch.from_numpy(np.random.default_rng(0).integers(-127, 128, head.shape))
        whole[:, 0] = 127
        state["lm_head.weight"] = (whole / 64).to(head.dtype)
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def run(path: Path, dtype: str, **options: Any) -> RequestOutput:
    sizes = {"max_model_len": 64, "max_batch_size": 1}
    with Engine(path, dtype=dtype, **sizes, **options) as engine:
        return engine.generate(PROMPT, greedy(12, logprobs=3, prompt_logprobs=3))


class Recorder:
    """A ModelBuilder that notes what it gets as values and what as integers."""

    def __init__(self, *given: Any) -> None:
        self.inner = specrt._core.ModelBuilder(*given)
        self.values: list[str] = []
        self.integers: list[str] = []
        Recorder.last = self

    def set(self, name: str, *given: Any) -> None:
        self.values.append(name)
        self.inner.set(name, *given)

    def set_quantised(self, name: str, *given: Any, **more: Any) -> None:
        self.integers.append(name)
        self.inner.set_quantised(name, *given, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    class Core:
        ModelBuilder = Recorder

        def __getattr__(self, name: str) -> Any:
            return getattr(specrt._core, name)

    monkeypatch.setattr(loaded, "_core", Core())
    return Recorder


def check_kept(path: Path, dtype: str, recorder: type[Recorder], what: str) -> None:
    """The integers are kept, and the model says what its bfloat16 reading says, nearly.

    Nearly, since that rounds the weights that the integers stand for. One integer in a wrong place
    would show: what these models say is tens apart.
    """
    got = run(path, dtype)
    assert len(recorder.last.integers) == 14, what
    assert not [name for name in recorder.last.values if name.endswith(LINEAR)], what
    for isa in specrt.available_cpu_isas():
        want = logprobs(run(path, "bfloat16", cpu_isa=isa))
        assert np.allclose(logprobs(run(path, dtype, cpu_isa=isa)), want, atol=0.5), (
            what,
            isa,
        )
    assert len(set(got.token_ids)) > 2, what


@pytest.mark.parametrize("name", INT4)
def test_int4_is_kept(name: str, tmp_path: Path, recorder: type[Recorder]) -> None:
    path, _ = write(tmp_path, *FORMATS[name])
    head_on_a_grid(path)
    with open_checkpoint(path, dtype="int4") as checkpoint:
        assert checkpoint.dtype == "int4"
        check_codes(checkpoint, "int4")
    check_kept(path, "int4", recorder, name)


def test_int8_is_kept(tmp_path: Path, recorder: type[Recorder]) -> None:
    path, _ = write(tmp_path, *FORMATS["ct-int8"])
    weight = stored_part(path, "weight").clone()
    weight[0, 0] = -128
    edit(path, weight=weight)
    head_on_a_grid(path)
    with open_checkpoint(path, dtype="int8") as checkpoint:
        check_codes(checkpoint, "int8")
        check_codes(checkpoint, "w8a8")
    check_kept(path, "int8", recorder, "ct-int8")


@pytest.mark.parametrize("family", ["phi3", "gemma2", "qwen3"])
@pytest.mark.parametrize("name", ["gptq-32", "awq-32", "ct-int8"])
def test_fused_and_transformed_tensors(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are split as values are, piece by piece; norms that are transformed stay values."""
    monkeypatch.setattr(quantised, "_SLAB", 128 * 24)
    path, _ = write(tmp_path, *FORMATS[name], family=family)
    precision = "int8" if "int8" in name else "int4"
    with open_checkpoint(path, dtype=precision) as checkpoint:
        check_codes(checkpoint, precision)
    run(path, precision)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_is_kept(kind: str, tmp_path: Path, recorder: type[Recorder]) -> None:
    """Llama's q and k rows, which the file has in another order, move alike as integers."""
    path = tiny.tiny_llama(tmp_path / "hf")
    head_on_a_grid(path)
    tensors = converted(path)
    file = write_gguf(tmp_path / "a.gguf", tensors, kind=kind)
    with open_checkpoint(file, dtype="int4") as checkpoint:
        for name, array in values(checkpoint).items():
            codes = checkpoint.codes(name, "int4")
            assert (codes is not None) == (array.ndim == 2), name
            if codes is not None:
                want = as_float32(quantised.to_bfloat16(np.ascontiguousarray(array)))
                assert np.array_equal(effective(codes), want), name
                assert checkpoint.codes(name, "int8") is None
    got = run(file, "int4")
    assert len(recorder.last.integers) == 14
    want = run(file, "bfloat16")  # but for the head, which is rounded to int8
    assert np.allclose(logprobs(got), logprobs(want), atol=0.5)


def logprobs(output: RequestOutput) -> list[float]:
    """Of the prompt's own tokens."""
    steps = output.prompt_logprobs or []
    return [step[token].logprob for token, step in zip(PROMPT, steps, strict=True) if step]


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0"])
def test_other_gguf_types_are_rounded_anew(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", converted(tiny.tiny_llama(tmp_path / "hf")), kind=kind)
    with open_checkpoint(file) as checkpoint:
        for precision in ("int8", "int4", "w8a8"):
            assert checkpoint.codes("layers.0.attention.q", precision) is None
    assert np.allclose(logprobs(run(file, "int8")), logprobs(run(file, "bfloat16")), atol=0.6)


def test_natural_order_in_g_idx_is_kept(tmp_path: Path) -> None:
    """desc_act is no obstacle where the inputs of a group lie together all the same."""
    path, _ = write(tmp_path, *FORMATS["gptq-32"])
    config = {**FORMATS["gptq-32"][0], "desc_act": True}
    with open_checkpoint(edit_config(path, quantization_config=config), dtype="int4") as checkpoint:
        check_codes(checkpoint, "int4")


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("gptq-order", "int4", "act-order"),
        ("gptq-v2", "int4", "act-order"),
        ("ct-int4-zeros", "int4", "act-order"),
        ("ct-int8-zeros", "int8", "zero points"),
    ],
)
def test_integers_that_cannot_be_kept(name: str, dtype: str, why: str, tmp_path: Path) -> None:
    # Attention's output layer reads more than one group of 64, as the others do.
    path, plain = write(tmp_path, *FORMATS[name], head_dim=32)
    with pytest.warns(UserWarning, match=f"own {dtype} cannot be kept.*{why}") as said:
        got = run(path, dtype)
    assert len([one for one in said if "cannot be kept" in str(one.message)]) == 1
    assert_same([got], [run(plain, dtype)], "rounded as its dequantised model is")


def test_scales_beyond_fp16(tmp_path: Path) -> None:
    path, plain = write(tmp_path, *FORMATS["awq-32"])
    scales = stored_part(path, "scales").float()
    edit(path, scales=scales * 1.0001)
    with pytest.warns(UserWarning, match="scales are beyond fp16"):
        got = run(path, "int4")
    assert np.allclose(logprobs(got), logprobs(run(plain, "int4")), atol=1.5)


@pytest.mark.parametrize("name", ["gptq-32", "ct-int8", "fp8-blocks", "ct-int8-packed"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "w8a8"])
@pytest.mark.filterwarnings("ignore:.*activations are")
def test_any_checkpoint_in_any_precision(name: str, dtype: str, tmp_path: Path) -> None:
    """Whatever is not kept is rounded as the model that it stands for would be."""
    path, plain = write(tmp_path, *FORMATS[name])
    kept = (name, dtype) in (
        ("gptq-32", "int4"), ("ct-int8", "int8"), ("ct-int8", "w8a8"),
        ("ct-int8-packed", "int8"), ("ct-int8-packed", "w8a8"),
    )  # fmt: skip
    got = run(path, dtype)
    if not kept:
        assert_same([got], [run(plain, dtype)], (name, dtype))
    error = np.abs(np.subtract(logprobs(got), logprobs(run(plain, "float32"))))
    assert error.mean() < {"int8": 0.15, "w8a8": 0.3, "int4": 1.5}[dtype]


def test_activations_that_w8a8_quantises_as_the_checkpoint_says(tmp_path: Path) -> None:
    config, make = FORMATS["ct-int8"]
    path, _ = write(tmp_path, config, make)
    edit_config(
        path,
        quantization_config=changed(
            config, "config_groups", "g", "input_activations", to=PER_TOKEN
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_checkpoint(path, dtype="w8a8").close()
    with pytest.warns(UserWarning, match="activations are not quantised here"):
        open_checkpoint(path, dtype="int8").close()
    for key, value in (("dynamic", False), ("strategy", "tensor"), ("symmetric", False)):
        settings = {**PER_TOKEN, key: value}
        edit_config(
            path,
            quantization_config=changed(
                config, "config_groups", "g", "input_activations", to=settings
            ),
        )
        with pytest.warns(UserWarning, match="int8 here with a scale for each token, not as"):
            open_checkpoint(path, dtype="w8a8").close()


@pytest.mark.parametrize("dtype", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(dtype: str, value: float, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = tiny.tiny_llama(tmp_path / "a")
    state = load_file(path / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][100, 3] = value
    tiny.write_checkpoint(path, json.loads((path / "config.json").read_text()), state)
    with pytest.raises(LoadError, match=rf"layers\.1\.mlp\.up.*expected finite.*{dtype}.*got"):
        Engine(path, dtype=dtype, max_model_len=32, max_batch_size=1)


def test_values_stay_what_they_were(tmp_path: Path) -> None:
    """Asking for codes changes nothing about values."""
    path, plain = write(tmp_path, *FORMATS["gptq-32"])
    with open_checkpoint(path, dtype="int4") as one, open_checkpoint(plain) as other:
        one.codes("layers.0.attention.q", "int4")
        same(values(one), values(other))
