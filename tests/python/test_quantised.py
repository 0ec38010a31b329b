"""Quantised checkpoints are the models that their numbers stand for.

Each format is written here from random integers, zero points and scales, packed one value at a
time; the reference is scale * (value - zero), rounded to bfloat16 by torch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import assert_same, greedy
from test_loading import edit_config, same, values
from test_reference import assert_close, forced_logits, log_softmax

from specrt import Engine
from specrt.errors import LoadError
from specrt.loading import open_checkpoint, quantised
from specrt.loading.quantised import to_bfloat16

# (draws, rows, columns) -> what is stored, by the end of its name, and the weight as float32.
Made = tuple[dict[str, torch.Tensor], torch.Tensor]
Maker = Callable[[np.random.Generator, int, int], Made]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(integers: np.ndarray, bits: int = 4, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] -> words [n, ceil(m * bits / 32)]: place i of a word holds value order[i] of it."""
    each = 32 // bits
    words = np.zeros((len(integers), -(-integers.shape[1] // each)), np.uint32)
    for place, value in enumerate(order or range(each)):
        column = integers[:, value::each].astype(np.uint32) << np.uint32(bits * place)
        words[:, : column.shape[1]] |= column
    return torch.from_numpy(words.view(np.int32))


def grouped(
    draw: np.random.Generator, rows: int, columns: int, size: int, low: int, high: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Integers and zero points within [low, high), the latter [rows, groups], and fp16 scales."""
    groups = -(-columns // size)
    integers = draw.integers(low, high, (rows, columns))
    zeros = draw.integers(low, high, (rows, groups))
    spread = (high - low) * columns**0.5 / 3
    scales = torch.from_numpy((0.5 + draw.random((rows, groups))) / spread).half()
    return integers, zeros, scales


def weight(
    integers: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, group: np.ndarray
) -> torch.Tensor:
    result = torch.empty(integers.shape)
    for column, one in enumerate(group):
        difference = torch.from_numpy(integers[:, column] - zeros[:, one]).float()
        result[:, column] = scales[:, one].float() * difference
    return result


def gptq(size: int, *, sym: bool, act_order: bool = False, second: bool = False) -> Maker:
    def make(draw: np.random.Generator, rows: int, columns: int) -> Made:
        wide = columns if size == -1 else size
        integers, zeros, scales = grouped(draw, rows, columns, wide, 0, 16)
        if sym:
            zeros[:] = 8
        elif not second:
            zeros = np.maximum(zeros, 1)  # the first format cannot say 0
        group = np.arange(columns) // wide
        if act_order:
            draw.shuffle(group)
        stored = {
            "qweight": pack(integers).T.contiguous(),
            "qzeros": pack((zeros if second else zeros - 1).T.copy()),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return stored, weight(integers, zeros, scales, group)

    return make


def awq(size: int) -> Maker:
    def make(draw: np.random.Generator, rows: int, columns: int) -> Made:
        integers, zeros, scales = grouped(draw, rows, columns, size, 0, 16)
        stored = {
            "qweight": pack(integers.T.copy(), order=AWQ_ORDER),
            "qzeros": pack(zeros.T.copy(), order=AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return stored, weight(integers, zeros, scales, np.arange(columns) // size)

    return make


def float8(
    block: tuple[int, int], name: str, dtype: Any = torch.float32, flat: bool = False
) -> Maker:
    """One scale for each `block` of rows and columns; 0 is all of them."""

    def make(draw: np.random.Generator, rows: int, columns: int) -> Made:
        codes = torch.from_numpy(draw.integers(0, 256, (rows, columns)).astype(np.uint8))
        codes[(codes & 127) == 127] = 0  # no NaN
        stored = codes.view(torch.float8_e4m3fn)
        high, wide = block[0] or rows, block[1] or columns
        shape = -(-rows // high), -(-columns // wide)
        scales = torch.from_numpy((0.5 + draw.random(shape)) / (150 * columns**0.5)).to(dtype)
        full = scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return (
            {"weight": stored, name: scales.reshape(-1) if flat else scales},
            stored.float() * full[:rows, :columns],
        )

    return make


def int8(*, symmetric: bool) -> Maker:
    def make(draw: np.random.Generator, rows: int, columns: int) -> Made:
        integers, zeros, scales = grouped(draw, rows, columns, columns, -128, 128)
        stored = {
            "weight": torch.from_numpy(integers.astype(np.int8)),
            "weight_scale": scales.bfloat16(),
        }
        if symmetric:
            zeros[:] = 0
        else:
            stored["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        group = np.zeros(columns, int)
        return stored, weight(integers, zeros, stored["weight_scale"], group)

    return make


def packed(bits: int, size: int, *, symmetric: bool, act_order: bool = False) -> Maker:
    def make(draw: np.random.Generator, rows: int, columns: int) -> Made:
        half, wide = 1 << (bits - 1), size or columns
        integers, zeros, scales = grouped(draw, rows, columns, wide, -half, half)
        group = np.arange(columns) // wide
        stored = {
            "weight_packed": pack(integers + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if symmetric:
            zeros[:] = 0
        else:
            stored["weight_zero_point"] = pack((zeros + half).T.copy(), bits).T.contiguous()
        if act_order:
            draw.shuffle(group)
            stored["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return stored, weight(integers, zeros, scales, group)

    return make


def gptq_config(size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": False,
            "damp_percent": 0.01, "true_sequential": True, **more}  # fmt: skip


def awq_config(size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None, **more}  # fmt: skip


def fp8_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], **more}  # fmt: skip


def compressed_config(layout: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel",
                    "dynamic": False, "actorder": None, "block_structure": None,
                    "group_size": None, "observer": "minmax", "observer_kwargs": {}, **weights},
        "input_activations": None, "output_activations": None,
    }  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"g": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
            "global_compression_ratio": 1.5, "sparsity_config": {}, "version": "0.12"}  # fmt: skip


FORMATS: dict[str, tuple[dict[str, Any], Maker]] = {
    **{f"gptq-{size}": (gptq_config(size), gptq(size, sym=True)) for size in (32, 64, 128, -1)},
    "gptq-asym": (gptq_config(32, sym=False), gptq(32, sym=False)),
    "gptq-order": (
        gptq_config(64, desc_act=True, checkpoint_format="gptq"),
        gptq(64, sym=True, act_order=True),
    ),
    "gptq-v2": (
        gptq_config(32, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        gptq(32, sym=False, act_order=True, second=True),
    ),
    **{f"awq-{size}": (awq_config(size), awq(size)) for size in (32, 64, 128)},
    "fp8-blocks": (fp8_config(), float8((128, 128), "weight_scale_inv")),
    "fp8-small-blocks": (
        fp8_config(weight_block_size=[48, 32]),
        float8((48, 32), "weight_scale_inv", torch.bfloat16),
    ),
    "fp8-tensor": (
        fp8_config(weight_block_size=None), float8((0, 0), "weight_scale", flat=True)
    ),
    "fp8-rows": (fp8_config(weight_block_size=None), float8((1, 0), "weight_scale")),
    "ct-fp8-tensor": (
        compressed_config("float-quantized", 8, "float", strategy="tensor"),
        float8((0, 0), "weight_scale", torch.bfloat16, flat=True),
    ),
    "ct-fp8-channel": (
        compressed_config("float-quantized", 8, "float"),
        float8((1, 0), "weight_scale", torch.bfloat16),
    ),
    "ct-fp8-block": (
        compressed_config(
            "float-quantized", 8, "float", strategy="block", block_structure=[128, 128]
        ),
        float8((128, 128), "weight_scale"),
    ),
    "ct-int8": (compressed_config("int-quantized", 8), int8(symmetric=True)),
    "ct-int8-zeros": (
        compressed_config("int-quantized", 8, symmetric=False), int8(symmetric=False)
    ),
    "ct-int4": (
        compressed_config("pack-quantized", 4, strategy="group", group_size=32),
        packed(4, 32, symmetric=True),
    ),
    "ct-int4-zeros": (
        compressed_config(
            "pack-quantized", 4, strategy="group", group_size=64, symmetric=False, actorder="group"
        ),
        packed(4, 64, symmetric=False, act_order=True),
    ),
    "ct-int8-packed": (
        compressed_config("pack-quantized", 8), packed(8, 0, symmetric=True)
    ),
}  # fmt: skip


def write(
    tmp_path: Path, config: dict[str, Any], make: Maker, family: str = "llama", **sizes: int
) -> tuple[Path, Path]:
    """A quantised checkpoint, and the bfloat16 checkpoint that it stands for."""
    from safetensors.torch import load_file, save_file

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **sizes}
    plain = tiny.tiny_family(tmp_path / "plain", family, dtype="bfloat16", **sizes)
    stored, dense = {}, load_file(plain / "model.safetensors")
    draw = np.random.default_rng(3)
    for name, tensor in list(dense.items()):
        if not name.endswith("proj.weight"):
            stored[name] = tensor
            continue
        parts, full = make(draw, *tensor.shape)
        module = name.removesuffix(".weight")
        stored.update({f"{module}.{part}": one for part, one in parts.items()})
        dense[name] = full.bfloat16()
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "quantised"
    path.mkdir()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return path, plain


def edit(path: Path, **changes: torch.Tensor | None) -> Path:
    """Replaces, adds or (with None) removes parts of layer 0's q_proj."""
    from safetensors.torch import load_file, save_file

    state = load_file(path / "model.safetensors")
    for part, tensor in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{part}"
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def stored_part(path: Path, part: str) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")[f"model.layers.0.self_attn.q_proj.{part}"]


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
@pytest.mark.parametrize("name", FORMATS)
def test_format_stands_for_its_dequantised_model(name: str, tmp_path: Path) -> None:
    path, plain = write(tmp_path, *FORMATS[name])
    with open_checkpoint(path) as one, open_checkpoint(plain) as other:
        assert (one.config, one.dtype) == (other.config, "bfloat16")
        assert {tensor.dtype for tensor in one.tensors()} == {"bfloat16"}
        same(values(one), values(other))
    vocab, prompt = 128, [5, 6, 7, 5, 6, 7, 5, 90, 2]
    options = {"dtype": "float32", "max_model_len": 64, "max_batch_size": 1}
    outputs = []
    for target in (path, plain):
        with Engine(target, **options) as engine:
            outputs.append(engine.generate(prompt, greedy(12, logprobs=vocab)))
    assert_same(outputs[:1], outputs[1:], name)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_close(log_softmax(outputs[0]), forced_logits(model, outputs[0]), name)


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
@pytest.mark.parametrize("name", ["gptq-order", "awq-32", "fp8-small-blocks", "ct-int4-zeros"])
def test_fused_projections_and_small_pieces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are decoded by themselves, whatever words and blocks they share with others."""
    monkeypatch.setattr(quantised, "_SLAB", 128 * 24)
    path, plain = write(tmp_path, *FORMATS[name], family="phi3")
    with open_checkpoint(path) as one, open_checkpoint(plain) as other:
        same(values(one), values(other))


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
def test_sizes_that_blocks_do_not_divide(tmp_path: Path) -> None:
    for i, (name, sizes) in enumerate((
        ("fp8-blocks", {"intermediate_size": 200}),
        ("ct-fp8-block", {"intermediate_size": 200}),
        ("ct-int4", {"intermediate_size": 204}),
        ("ct-int4-zeros", {"intermediate_size": 204}),
        ("gptq-128", {"intermediate_size": 200}),
    )):  # fmt: skip
        path, plain = write(tmp_path / str(i), *FORMATS[name], **sizes)
        with open_checkpoint(path) as one, open_checkpoint(plain) as other:
            same(values(one), values(other))


def test_every_float8_code() -> None:
    from specrt.loading.quant_floats import _FLOAT8

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(_FLOAT8, codes, equal_nan=True)


def test_rounding_is_torchs() -> None:
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    bits[:4096] = (bits[:4096] & 0xFFFF0000) | 0x8000  # ties
    floats = bits.view(np.float32)
    want = torch.from_numpy(floats).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(floats)
    assert np.array_equal(to_bfloat16(floats)[~nan], want[~nan])
    kept = (to_bfloat16(floats)[nan].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(kept).all()


def test_layers_that_were_left_out(tmp_path: Path) -> None:
    """A listed layer has to be stored plainly; one that is stored plainly need not be listed."""
    path, plain = write(tmp_path, *FORMATS["awq-32"])
    dense = stored_part(plain, "weight")
    for kept in (["self_attn.q_proj"], ["q_proj"], ["model.layers.0.self_attn.q_proj"]):
        config = awq_config(32, modules_to_not_convert=kept)
        with pytest.raises(LoadError, match=r"q_proj\.qweight.*unquantised.*" + kept[0]):
            open_checkpoint(edit_config(path, quantization_config=config))
    edit(path, qweight=None, qzeros=None, scales=None, weight=dense)
    for kept in (["model.layers.0.self_attn.q_proj"], None):
        config = awq_config(32, modules_to_not_convert=kept)
        edit_config(path, quantization_config=config)
        with open_checkpoint(path) as one, open_checkpoint(plain) as other:
            same(values(one), values(other))


def test_ignore_lists_with_patterns(tmp_path: Path) -> None:
    config, make = FORMATS["ct-int8"]
    path, _ = write(tmp_path, config, make)
    for pattern in ("re:.*q_proj", "re:model.layers.0.self_attn.[qk]_proj$"):
        edit_config(path, quantization_config={**config, "ignore": ["lm_head", pattern]})
        with pytest.raises(LoadError, match="leaves out " + re.escape(repr(pattern))):
            open_checkpoint(path)
    edit_config(path, quantization_config={**config, "ignore": ["re:.*vision.*", "proj", "q_pro"]})
    open_checkpoint(path).close()


def test_biases_that_tools_invent(tmp_path: Path) -> None:
    path, plain = write(tmp_path, *FORMATS["gptq-32"])
    edit(path, bias=torch.zeros(64, dtype=torch.float16))
    with open_checkpoint(path) as one, open_checkpoint(plain) as other:
        same(values(one), values(other))
    edit(path, bias=torch.full((64,), 0.5, dtype=torch.float16))
    with pytest.raises(LoadError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"):
        open_checkpoint(path)


def test_activations_that_stay_as_they_are(tmp_path: Path) -> None:
    path, _ = write(tmp_path / "a", *FORMATS["fp8-tensor"])
    config = fp8_config(weight_block_size=None, activation_scheme="static")
    edit(edit_config(path, quantization_config=config), input_scale=torch.ones(()))
    with pytest.warns(UserWarning, match="fp8: activations are not quantised here"):
        open_checkpoint(path).close()
    config, make = FORMATS["ct-int8"]
    path, _ = write(tmp_path / "b", config, make)
    config = json.loads(json.dumps(config))
    config["config_groups"]["g"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    with pytest.warns(UserWarning, match="tensors: activations are not quantised here"):
        open_checkpoint(edit_config(path, quantization_config=config)).close()


def changed(config: dict[str, Any], *keys: str, to: Any) -> dict[str, Any]:
    """The config with one value, somewhere inside, replaced."""
    copy = json.loads(json.dumps(config))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return copy


CT, CT4, WEIGHTS = FORMATS["ct-int8"][0], FORMATS["ct-int4"][0], ("config_groups", "g", "weights")


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"bits": 4}, "quant_method.*got None"),
        *(({"quant_method": one, "bits": 4}, f"quantization_config.*got '{one}'") for one in (
            "bitsandbytes", "hqq", "aqlm", "quanto", "mxfp4", "modelopt", "torchao", "eetq")),
        (["gptq"], "quantization_config.*object"),
        (gptq_config(32, bits=8), "gptq bits.*got 8"),
        (gptq_config(32, bits=None), "expected a value for 'bits'"),
        (gptq_config(20), "gptq group_size.*got 20"),
        (gptq_config(32, checkpoint_format="marlin"), "checkpoint_format.*'marlin'"),
        (gptq_config(32, is_marlin_format=True), "'is_marlin_format'"),
        (gptq_config(32, dynamic={"-:lm_head": {}}), "'dynamic'"),
        (gptq_config(32, adapter={"rank": 8}), "'adapter'"),
        (gptq_config(32, pack_dtype="int16"), "pack_dtype.*'int16'"),
        (gptq_config(32, desc_act="yes"), "desc_act"),
        (awq_config(32, bits=3), "awq bits.*got 3"),
        (awq_config(32, version="gemv"), "awq version.*'gemv'"),
        (awq_config(32, zero_point=False), "zero_point.*got False"),
        (awq_config(32, backend="llm-awq"), "backend.*'llm-awq'"),
        (awq_config(32, modules_to_not_convert="lm_head"), "modules_to_not_convert.*list"),
        (fp8_config(fmt="e5m2"), "fp8 fmt.*'e5m2'"),
        (fp8_config(weight_block_size=[128]), "block of two"),
        (fp8_config(expert_dtype="fp4"), "expert_dtype"),
        (fp8_config(activation_scheme="other"), "activation_scheme"),
        (fp8_config(kv_cache_scheme="fp8"), "'kv_cache_scheme'"),
        (changed(CT, "format", to="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (changed(CT, "format", to="marlin-24"), "'marlin-24'"),
        (changed(CT4, *WEIGHTS, "num_bits", to=3), "num_bits 3"),
        (changed(CT, "kv_cache_scheme", to={"num_bits": 8}), "'kv_cache_scheme'"),
        (changed(CT, "sparsity_config", to={"format": "sparse-24-bitmask"}), "'sparsity_config'"),
        (changed(CT, "transform_config", to={"config_groups": {"a": 1}}), "'transform_config'"),
        (changed(CT, "config_groups", to={}), "config_groups.*one group"),
        (changed(CT, "config_groups", "h", to={"targets": ["Linear"]}), r"one group.*\['g', 'h'\]"),
        (changed(CT, "config_groups", "g", "targets", to=["re:.*q_proj"]), "targets.*q_proj"),
        (changed(CT, "config_groups", "g", "output_activations", to={"num_bits": 8}),
         "'output_activations'"),
        (changed(CT, *WEIGHTS, "dynamic", to=True), "dynamic.*got True"),
        (changed(CT, *WEIGHTS, "strategy", to="token"), "strategy.*'token'"),
        (changed(CT4, *WEIGHTS, "group_size", to=0), "group_size.*got 0"),
        (changed(CT, *WEIGHTS, "new_thing", to=1), "'new_thing'"),
    ],
)  # fmt: skip
def test_config_refused_by_name(config: Any, says: str, tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path, "llama")
    with pytest.raises(LoadError, match=says):
        open_checkpoint(edit_config(path, quantization_config=config))


def test_whatever_is_no_quantised_safetensors_checkpoint(tmp_path: Path) -> None:
    path = tiny.tiny_family(tmp_path / "plain", "llama")
    with pytest.raises(LoadError, match="expected quantised weights, got none"):
        open_checkpoint(edit_config(path, quantization_config=gptq_config(32)))
    from transformers import AutoModelForCausalLM

    edit_config(path, quantization_config=...)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.quantization_config = gptq_config(32)
    with pytest.raises(LoadError, match=r"in memory.*gptq"):
        open_checkpoint(model)
    path, _ = write(tmp_path, *FORMATS["gptq-32"])
    edit_config(path, quantization_config=...)
    with pytest.raises(LoadError, match=r"unexpected .*q_proj\.qweight|unexpected .*qweight"):
        open_checkpoint(path)
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*safetensors only"):
        open_checkpoint(edit_config(path, quantization_config=gptq_config(32)))


PARTS = {
    "gptq-order": ("qweight", "qzeros", "scales", "g_idx"),
    "awq-32": ("qweight", "qzeros", "scales"),
    "fp8-blocks": ("weight", "weight_scale_inv"),
    "ct-int8-zeros": ("weight", "weight_scale", "weight_zero_point"),
    "ct-int4-zeros": (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*activations are not quantised")
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_missing_or_do_not_fit(name: str, tmp_path: Path) -> None:
    """Every part: absent, of another type, a row short. All of it before anything is read."""
    path, _ = write(tmp_path, *FORMATS[name])
    for part, how in itertools.product(PARTS[name], ("absent", "type", "shape")):
        if (part, how) == ("weight_g_idx", "absent"):
            continue  # the natural order
        good = stored_part(path, part)
        bad = {
            "absent": None,
            "type": torch.zeros(good.shape, dtype=torch.float64),
            "shape": good[:-8].clone() if len(good) > 8 else good[:-1].clone(),
        }[how]
        edit(path, **{part: bad})
        with pytest.raises(LoadError, match=r"model\.layers\.0\.self_attn\.q_proj\.?"):
            open_checkpoint(path)
        edit(path, **{part: good})
    open_checkpoint(path).close()


def test_parts_too_many(tmp_path: Path) -> None:
    path, plain = write(tmp_path, *FORMATS["gptq-32"])
    edit(path, weight=stored_part(plain, "weight"))
    with pytest.raises(LoadError, match=r"q_proj\.weight.*got both"):
        open_checkpoint(path)
    edit(path, weight=None, other=torch.ones(3))
    with pytest.raises(LoadError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.other"):
        open_checkpoint(path)


def test_groups_that_do_not_exist(tmp_path: Path) -> None:
    path, _ = write(tmp_path, *FORMATS["gptq-order"])
    for wrong in (2, -1):
        order = stored_part(path, "g_idx").clone()
        order[7] = wrong
        edit(path, g_idx=order)
        with (
            open_checkpoint(path) as checkpoint,
            pytest.raises(LoadError, match=r"q_proj\.g_idx.*groups below 2"),
        ):
            values(checkpoint)
