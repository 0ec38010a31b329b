"""`specrt.quantize`: int4 with a text to go by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import assert_same, greedy
from typer.testing import CliRunner

import specrt
from specrt import Engine, InvalidArgumentError, LoadError, NumericError, _core, calibration
from specrt.calibration import compensated, factor_of, values_of
from specrt.cli import app
from specrt.loading import open_checkpoint
from specrt.loading.quantised import to_bfloat16
from specrt.loading.source import as_float32

SMALL: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 4, "threads": 1}
DRAW = np.random.default_rng(0)
TEXT = [int(one) for one in DRAW.integers(0, 128, 600)]


def inputs_alike(positions: int, columns: int, seed: int) -> np.ndarray:
    """Inputs that go together, some of them huge: what a layer of a trained model reads."""
    draw = np.random.default_rng(seed)
    mixed = draw.normal(size=(positions, columns)) @ draw.normal(size=(columns, columns))
    mixed[:, : columns // 2] += 3 * draw.normal(size=(positions, 1)) * columns**0.5
    return (mixed * np.exp(draw.normal(size=columns))).astype(np.float32)


def rounded(weight: np.ndarray) -> np.ndarray:
    """By the core alone, without a text: the same search, every input alike, errors left alone."""
    result = np.empty_like(weight)
    for start in range(0, weight.shape[1], 32):
        part = np.ascontiguousarray(weight[:, start : start + 32])
        width = np.eye(part.shape[1], dtype=np.float32)
        codes, scales, minima, _ = _core.quantise_compensated(part, width)
        result[:, start : start + 32] = as_float32(to_bfloat16(codes * scales + minima))
    return result


@pytest.mark.parametrize("columns", [32, 96, 80])
def test_outputs_are_nearer_than_with_plain_rounding(columns: int) -> None:
    draw = np.random.default_rng(columns)
    weight = draw.normal(size=(24, columns)).astype(np.float32)
    inputs = inputs_alike(500, columns, seed=1)
    codes = compensated(weight, factor_of((inputs.T @ inputs).astype(np.float64)))
    meant = as_float32(to_bfloat16(values_of(codes)))

    def error(values: np.ndarray, of: np.ndarray) -> float:
        return float(((of @ (values - weight).T) ** 2).sum())

    assert error(meant, inputs) < 0.5 * error(rounded(weight), inputs)
    # It is not only this text's: others of the same kind gain as well.
    more = np.concatenate([inputs[250:], inputs[:1]])
    half = compensated(weight, factor_of((inputs[:250].T @ inputs[:250]).astype(np.float64)))
    assert error(as_float32(to_bfloat16(values_of(half))), more) < error(rounded(weight), more)


def test_weights_on_a_grid_stay() -> None:
    """Nothing to round, nothing to make up for."""
    draw = np.random.default_rng(5)
    codes = draw.integers(0, 16, (8, 64)).astype(np.int8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = draw.uniform(0.5, 2, (8, 2)).astype(np.float16).astype(np.float32)
    minima = (-8 * scales).astype(np.float32)
    weight = codes * np.repeat(scales, 32, 1) + np.repeat(minima, 32, 1)
    made = compensated(weight, np.eye(64, dtype=np.float32))
    assert (made.codes == codes).all()
    np.testing.assert_allclose(values_of(made), weight, rtol=1e-3, atol=1e-3)


def test_an_input_that_is_never_set() -> None:
    inputs = inputs_alike(300, 64, seed=2)
    inputs[:, [3, 40]] = 0
    weight = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)
    for moments in (inputs.T @ inputs, np.zeros((64, 64))):
        codes = compensated(weight, factor_of(moments.astype(np.float64)))
        assert np.abs(values_of(codes) - weight).max() < 2.0


def test_what_the_core_refuses() -> None:
    weight, unit = np.ones((4, 8), np.float32), np.eye(8, dtype=np.float32)
    for weights, factor in (
        (weight, unit[:7]),
        (weight, np.eye(7, dtype=np.float32)),
        (weight, 0 * unit),
        (weight, unit * np.float32("nan")),
        (weight * np.float32("nan"), unit),
        (weight * np.float32(40000), unit),
        (np.ones((4, 33), np.float32), np.eye(33, dtype=np.float32)),
        (weight[0], unit),
    ):
        with pytest.raises(InvalidArgumentError, match="expected"):
            _core.quantise_compensated(weights, factor)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_by_themselves_are_the_model(family: str, tmp_path: Path) -> None:
    """Traced one by one, with windows, scales and norms of its own each, they give its logits."""
    path = tiny.tiny_family(tmp_path / family, family, dtype="bfloat16")
    ids = [one % 64 for one in TEXT[:100]]
    with Engine(path, dtype="bfloat16", **SMALL) as engine:
        output = engine.generate(ids, greedy(1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    with open_checkpoint(path) as checkpoint:
        (stream,) = calibration._embedded(checkpoint, [ids])
        for index in range(checkpoint.config.num_layers):
            prefix = f"layers.{index}."
            names = [one for one in checkpoint.names if one.startswith(prefix)]
            tensors = {one.removeprefix(prefix): checkpoint.tensor(one) for one in names}
            layer = calibration._layer_model(checkpoint, index, tensors)
            *inputs, stream = _core.trace_layer(layer, stream)
            assert [len(one) for one in inputs] == [len(ids)] * 4
        fields = checkpoint.config
        head = "embedding" if fields.tied_embeddings else "lm_head"
        head_values = as_float32(checkpoint.tensor(head).array)
        norm = as_float32(checkpoint.tensor("norm").array)
    mean = np.sqrt((stream.astype(np.float64) ** 2).mean(1, keepdims=True) + fields.norm_eps)
    logits = as_float32(to_bfloat16((stream / mean * norm).astype(np.float32))) @ head_values.T
    logits *= fields.logits_scale
    shifted = logits - logits.max(1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    for at, (token, step) in enumerate(zip(ids, output.prompt_logprobs, strict=True)):
        if step is not None:
            assert abs(step[token].logprob - logprobs[at - 1, token]) < 1e-3


def test_a_file_that_engines_map(l2: Path, tmp_path: Path) -> None:
    path = tmp_path / "rounded.specrt"
    specrt.quantize(l2, TEXT, path)
    with Engine(l2, dtype="int4", **SMALL) as plain:
        sizes = plain.memory
    prompts = ["abcabc", [1, 2, 3]]
    params = [greedy(40), greedy(40, temperature=1.0, seed=2)]
    with Engine(path, tokenizer=l2, **SMALL) as engine:
        assert (engine.dtype, engine.memory) == ("int4", sizes)
        expected = engine.generate(prompts, params)
    with Engine(path, "ngram", tokenizer=l2, **SMALL) as engine:
        assert_same(engine.generate(prompts, params), expected, "ngram")
    again = tmp_path / "again.specrt"
    specrt.quantize(l2, TEXT, again)
    assert again.read_bytes() == path.read_bytes()


def test_what_is_int4_already_stays(
    l2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's own codes go in untouched, and the text has no say."""
    with open_checkpoint(l2) as checkpoint:
        codes = {
            one: compensated(as_float32(checkpoint.tensor(one).array), np.eye(64, dtype=np.float32))
            for one in checkpoint.names
            if one.endswith(("attention.q", "mlp.gate"))
        }
    monkeypatch.setattr(
        specrt.loading.Checkpoint, "codes", lambda self, name, precision: codes.get(name)
    )
    given: dict[str, Any] = {}

    class Recorder:
        def __init__(self, config: Any, dtype: str) -> None:
            self.inner = builder(config, dtype)

        def set_quantised(self, name: str, precision: str, array: Any, *rest: Any, **more: Any):
            given[name] = array
            self.inner.set_quantised(name, precision, array, *rest, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    builder = _core.ModelBuilder
    monkeypatch.setattr(_core, "ModelBuilder", Recorder)
    specrt.quantize(l2, TEXT, tmp_path / "kept.specrt")
    assert len(given) == 14
    for name, one in codes.items():
        assert given[name] is one.codes


def test_refusals(l2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.specrt"
    for options, says in (
        ({"dtype": "int8"}, "expected 'int4'"),
        ({"text": TEXT[:255]}, "at least 256 tokens, got 255"),
        ({"text": [*TEXT, 264]}, "tokens from 0 to 263"),
        ({"path": tmp_path / "out.bin"}, "ending in .specrt"),
        ({"path": tmp_path / "absent" / "out.specrt"}, "existing folder"),
        ({"target": out}, "weights are packed"),
    ):
        given: dict[str, Any] = {"target": l2, "text": TEXT, "path": out, **options}
        with pytest.raises(InvalidArgumentError, match=says):
            specrt.quantize(**given)
    bare = tiny.tiny_llama(tmp_path / "bare")
    with pytest.raises(InvalidArgumentError, match="without a tokenizer"):
        specrt.quantize(bare, "a text", out)
    with pytest.raises(LoadError):
        specrt.quantize(tmp_path, TEXT, out)
    assert not out.exists()


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = tiny.tiny_llama(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = np.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(NumericError, match=r"layers\.0\.attention\.q"):
        specrt.quantize(path, TEXT, tmp_path / "out.specrt")


def test_the_command(l2: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.specrt"
    text.write_text("abc def " * 60)
    options = ["quantize", str(l2), "--calibrate", str(text), "--out", str(out)]
    assert CliRunner().invoke(app, options).exit_code == 0
    with Engine(out, **SMALL) as engine:
        assert engine.dtype == "int4"
    refused = CliRunner().invoke(app, [*options, "--dtype", "w8a8"]).exception
    assert isinstance(refused, InvalidArgumentError)
