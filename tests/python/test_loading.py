"""Every layout a checkpoint may have gives the same tensors, config and token ids."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from specrt.errors import InvalidArgumentError, LoadError
from specrt.loading import Checkpoint, ModelFields, open_checkpoint, tensor_shapes
from specrt.loading.families import FAMILIES
from specrt.loading.families import fields_of as config_fields


def values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """All tensors as float32."""
    found = {}
    for tensor in checkpoint.tensors():
        bits = tensor.array
        if tensor.dtype == "bfloat16":
            assert bits.dtype == np.uint16
            bits = (bits.astype(np.uint32) << 16).view(np.float32)
        assert bits.dtype == np.float32
        found[tensor.name] = bits
    return found


def reference(path: Path) -> dict[str, np.ndarray]:
    """All tensors under canonical names, as transformers loads them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = {}
    for template, theirs in FAMILIES[model.config.model_type].names.items():
        for i in range(model.config.num_hidden_layers):
            names[theirs.replace("{i}", str(i))] = template.replace("{i}", str(i))
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {names[name]: tensor.numpy() for name, tensor in state.items()}


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert np.array_equal(one[name], two[name]), name


def edit_config(path: Path, **changes: Any) -> Path:
    """Changes keys of a checkpoint's config.json; `...` removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    file.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_qwen2])
def test_tensors_are_those_of_transformers(
    tmp_path: Path, make: Any, sharded: bool, dtype: str
) -> None:
    make(tmp_path, dtype=dtype, sharded=sharded)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.kind == "safetensors"
        assert checkpoint.dtype == ("float32" if dtype == "float32" else "bfloat16")
        kinds = {tensor.dtype for tensor in checkpoint.tensors()}
        assert kinds == {"bfloat16" if dtype == "bfloat16" else "float32"}
        shapes = {tensor.name: tensor.array.shape for tensor in checkpoint.tensors()}
        assert shapes == tensor_shapes(checkpoint.config)
        assert list(shapes) == list(tensor_shapes(checkpoint.config))
        same(values(checkpoint), reference(tmp_path))


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_llama_biases_and_ties(
    tmp_path: Path, attention_bias: bool, mlp_bias: bool, tie: bool
) -> None:
    tiny.tiny_llama(tmp_path, attention_bias=attention_bias, mlp_bias=mlp_bias, tie=tie)
    with open_checkpoint(tmp_path) as checkpoint:
        config = checkpoint.config
        assert (config.qkv_bias, config.output_bias) == (attention_bias, attention_bias)
        assert (config.mlp_bias, config.tied_embeddings) == (mlp_bias, tie)
        same(values(checkpoint), reference(tmp_path))


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path, head_dim=32)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.head_dim == 32
        assert tensor_shapes(checkpoint.config)["layers.0.attention.q"] == (128, 64)
        assert len(checkpoint.config.rope_inv_freq) == 16
        same(values(checkpoint), reference(tmp_path))


def test_mixed_dtypes_in_one_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tiny.tiny_llama(tmp_path, dtype="bfloat16", vocab=127)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    mixed = {
        name: tensor.to(
            torch.float32 if "norm" in name else torch.float16 if "mlp" in name else tensor.dtype
        )
        for name, tensor in state.items()
    }
    save_file(mixed, file, metadata={"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.dtype == "bfloat16"
        dtypes = {tensor.name: tensor.dtype for tensor in checkpoint.tensors()}
        assert dtypes["norm"] == dtypes["layers.0.mlp.up"] == "float32"
        assert dtypes["layers.0.attention.q"] == "bfloat16"
        for tensor in checkpoint.tensors():
            assert tensor.array.flags.aligned
            assert tensor.array.flags.c_contiguous
        got = values(checkpoint)
    for name, tensor in reference(tmp_path).items():
        assert np.array_equal(got[name], tensor), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pickled_checkpoint(tmp_path: Path, dtype: str, sharded: bool) -> None:
    import torch
    from safetensors.torch import load_file

    tiny.tiny_llama(tmp_path / "a", dtype=dtype)
    want = reference(tmp_path / "a")
    path = tmp_path / "b"
    path.mkdir()
    (path / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    state = load_file(tmp_path / "a" / "model.safetensors")
    if sharded:
        names = sorted(state)
        halves = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        for file, part in halves.items():
            torch.save({name: state[name] for name in part}, path / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        index = path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, path / "pytorch_model.bin")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.kind == "torch"
        assert checkpoint.dtype == dtype
        same(values(checkpoint), want)
    if sharded:
        (path / "pytorch_model-2.bin").unlink()
        with pytest.raises(LoadError, match=r"missing shard: pytorch_model-2\.bin"):
            open_checkpoint(path)


def test_pickle_runs_no_code(tmp_path: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    tiny.tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_damaged_pickle(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tie", [False, True])
def test_model_in_memory(tmp_path: Path, dtype: str, tie: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tiny.tiny_llama(tmp_path, tie=tie, eos_token_id=[5, 7], dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    with open_checkpoint(model) as memory, open_checkpoint(tmp_path) as stored:
        assert memory.kind == "memory"
        assert memory.name == "LlamaForCausalLM"
        assert memory.dtype == stored.dtype
        assert memory.config == stored.config
        assert memory.eos_token_ids == stored.eos_token_ids == (5, 7)
        assert memory.load_tokenizer() is None
        same(values(memory), values(stored))


def test_model_in_memory_of_a_subclass_and_of_another_class(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    class Mine(LlamaForCausalLM):
        pass

    small: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    with open_checkpoint(Mine(LlamaConfig(**small))) as checkpoint:
        assert checkpoint.name == "Mine"
    other = LlamaForSequenceClassification(LlamaConfig(**small, pad_token_id=0))
    with pytest.raises(LoadError, match="LlamaForSequenceClassification"):
        open_checkpoint(other)


def test_tokens_prefer_the_generation_config(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path, eos_token_id=3)
    generation = tmp_path / "generation_config.json"
    for generated, want in (
        ({"eos_token_id": [1, 2, 1]}, (1, 2)),
        ({"eos_token_id": 4}, (4,)),
        ({}, (3,)),
        (None, (3,)),
    ):
        generation.unlink(missing_ok=True)
        if generated is not None:
            generation.write_text(json.dumps(generated))
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.eos_token_ids == want
            assert checkpoint.bos_token_id is None
    generation.write_text(json.dumps({"bos_token_id": 9, "eos_token_id": 1000}))
    with pytest.warns(UserWarning, match="no token 1000"):
        checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.eos_token_ids == (3,)
    assert checkpoint.bos_token_id == 9
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(LoadError, match="eos_token_id"):
        open_checkpoint(tmp_path)
    generation.unlink()
    edit_config(tmp_path, eos_token_id=None)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.eos_token_ids == ()


@pytest.mark.parametrize(
    ("asked", "stored", "want"),
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("fp32", "bfloat16", "float32"),
        ("bf16", "float32", "bfloat16"),
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", "float32", "int8"),
        ("INT4", "bfloat16", "int4"),
        ("w8a8", "float16", "w8a8"),
        ("half", "float16", "float16"),
        ("torch.float16", "bfloat16", "float16"),
    ],
)
def test_dtype(tmp_path: Path, asked: str, stored: str, want: str) -> None:
    with open_checkpoint(tiny.tiny_llama(tmp_path, dtype=stored), dtype=asked) as checkpoint:
        assert checkpoint.dtype == want


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ("float64", InvalidArgumentError, r"expected 'auto'.*'w8a8', got 'float64'"),
        ("int3", InvalidArgumentError, r"expected .*'int8', 'int4' or 'w8a8', got 'int3'"),
    ],
)
def test_dtypes_refused_by_name(
    tmp_path: Path, asked: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        open_checkpoint(tiny.tiny_llama(tmp_path), dtype=asked)


def test_hub_id_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository in the hub's own cache opens without a network."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--tiny"
    tiny.tiny_llama(repository / "snapshots" / commit)
    tiny.byte_tokenizer(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    script = (
        "import sys; from specrt.loading import open_checkpoint\n"
        "c = open_checkpoint('someone/tiny'); print(c.name, c.kind, len(list(c.tensors())))\n"
        "assert 'torch' not in sys.modules\n"
        "print(c.load_tokenizer().encode('A'))\n"
        "from specrt.errors import LoadError\n"
        "try: open_checkpoint('someone/else')\n"
        "except LoadError as e: print(e)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "someone/tiny safetensors 21"
    assert lines[1] == "[65]"
    assert "[someone/else] no such folder, and cannot be had from the hub" in lines[2]


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; import specrt.loading, specrt.text\n"
        "heavy = {'torch', 'transformers', 'gguf', 'safetensors', 'tokenizers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_fields_are_those_of_the_core() -> None:
    core = pytest.importorskip("specrt._core")
    fields = ModelFields("llama", 8, 8, 8, 1, 1, 1, 8, 16, 1e-5, (1.0, 0.5, 0.25, 0.125))
    config = core.ModelConfig(**dataclasses.asdict(fields))
    assert (config.family, config.vocab_size, config.num_layers) == ("llama", 8, 1)


def test_every_family_is_whole() -> None:
    """Each family names every canonical tensor that its models have, with all options on."""
    for name, family in FAMILIES.items():
        sample = {
            "model_type": name, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        }  # fmt: skip
        for option in ("attention_bias", "mlp_bias"):
            with contextlib.suppress(LoadError):  # of a family without this option
                config_fields({**sample, option: True})
                sample[option] = True
        shapes = tensor_shapes(config_fields(sample))
        canonical = {one.replace("layers.0.", "layers.{i}.") for one in shapes}
        extra = family.names.keys() - canonical
        assert canonical <= family.names.keys(), name
        assert all(one.endswith(".bias") for one in extra), (name, extra)


def test_config_defaults_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, Qwen2Config

    for config_class in (LlamaConfig, Qwen2Config):
        defaults = config_class()
        stated = {
            key: getattr(defaults, key)
            for key in (
                "model_type", "vocab_size", "hidden_size", "intermediate_size",
                "num_hidden_layers", "num_attention_heads",
            )
        }  # fmt: skip
        fields = config_fields(stated)
        assert fields == config_fields(defaults.to_dict())
        assert fields.norm_eps == defaults.rms_norm_eps
        assert fields.max_position_embeddings == defaults.max_position_embeddings
        assert fields.tied_embeddings == defaults.tie_word_embeddings


def test_bigram_law_is_exact(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    table = np.random.default_rng(0).integers(-8, 8, (16, 16)).astype(np.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny.bigram(tmp_path / "b", table))
    logits = model(torch.arange(16)[None]).logits[0].detach().numpy()
    assert np.array_equal(logits, table)
    for maker, first, want in (
        (tiny.counter, 3, [4, 5, 6, 7]),
        (tiny.half_right, 3, [5, 7, 9, 11]),
    ):
        model = AutoModelForCausalLM.from_pretrained(maker(tmp_path / maker.__name__))
        out = model.generate(torch.tensor([[first]]), max_new_tokens=4, do_sample=False)
        assert out[0, 1:].tolist() == want
