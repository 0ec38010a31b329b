"""A checkpoint that is not exactly a model of a known family is refused, naming what is wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from test_loading import edit_config, values

from specrt.errors import InvalidArgumentError, LoadError
from specrt.loading import open_checkpoint

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edit_tensors(path: Path, **changes: np.ndarray | None) -> Path:
    """Replaces, adds or (with None) removes tensors; `__` in a name stands for a dot."""
    from safetensors.numpy import load_file, save_file

    file = path / "model.safetensors"
    state = load_file(file)
    for name, array in changes.items():
        name = name.replace("__", ".")
        if array is None:
            del state[name]
        else:
            state[name] = array
    save_file(state, file)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.tiny_llama(tmp_path / "llama")


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return tiny.tiny_qwen2(tmp_path / "qwen2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*'hqq'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
         "unknown architecture 'MambaForCausalLM'.*known: .*LlamaForCausalLM, .*Qwen2ForCausalLM"),
        ({"model_type": ..., "architectures": ...}, "unknown architecture None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp.*got 2"),
        ({"sliding_window": 128}, "'sliding_window'"),
        ({"layer_types": ["full_attention", "sliding_attention"]},
         "'sliding_attention' in layer 1"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention' in layer 0"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
        ({"logit_scale": 0.5}, "'logit_scale'"),
        ({"logits_scaling": 8.0}, "'logits_scaling'"),
        ({"embedding_multiplier": 12.0}, "'embedding_multiplier'"),
        ({"residual_multiplier": 0.2}, "'residual_multiplier'"),
        ({"scale_emb": 12}, "'scale_emb'"),
        ({"num_experts": 8}, "'num_experts'"),
        ({"num_local_experts": 8}, "'num_local_experts'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"rope_interleaved": True}, "'rope_interleaved'"),
        ({"use_qk_norm": True}, "'use_qk_norm'"),
        ({"no_rope_layers": [1, 0]}, "'no_rope_layers'"),
        ({"mtp_mixing": 1}, "'mtp_mixing'"),
        ({"linear_attn_config": {"a": 1}}, "'linear_attn_config'"),
        ({"hidden_size": "64"}, "hidden_size.*whole number.*'64'"),
        ({"hidden_size": ...}, "expected a value for 'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"head_dim": 15}, "head_dim.*even"),
        ({"rms_norm_eps": 0}, "norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"attention_bias": True},
         r"missing model\.layers\.0\.self_attn\.q_proj\.bias.*o_proj\.bias"),
        ({"vocab_size": 129}, r"embed_tokens\.weight: expected shape \[129, 64\], got \[128, 64\]"),
        ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"missing model\.layers\.2\."),
        ({"head_dim": 8}, r"q_proj\.weight: expected shape \[32, 64\], got \[64, 64\]"),
    ],
)  # fmt: skip
def test_config(llama: Path, changes: dict[str, Any], says: str) -> None:
    edit_config(llama, **changes)
    with pytest.raises(LoadError, match=says):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2, "sliding_window": None, "num_experts": 0},
        {"pretraining_tp": 1, "hidden_act": "silu", "layer_types": ["full_attention"] * 2},
        {"partial_rotary_factor": 1.0, "logit_scale": 1.0, "rope_interleaved": False},
        {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True},
        {"_attn_implementation": "sdpa", "_name_or_path": "x", "quantization_config": None},
        {"head_dim": None, "attention_bias": None, "mlp_bias": None},
        {"original_max_position_embeddings": 128},
    ],
)
def test_config_that_changes_nothing(llama: Path, changes: dict[str, Any]) -> None:
    with open_checkpoint(llama) as checkpoint:
        before = checkpoint.config
    with open_checkpoint(edit_config(llama, **changes)) as checkpoint:
        assert checkpoint.config == before


def test_heads_without_groups(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path, kv_heads=4)
    for absent in (..., None):
        with open_checkpoint(edit_config(path, num_key_value_heads=absent)) as checkpoint:
            assert checkpoint.config.num_kv_heads == 4


def test_qwen2_windows(qwen2: Path) -> None:
    with open_checkpoint(edit_config(qwen2, sliding_window=4096, max_window_layers=1)) as one:
        assert (one.config.qkv_bias, one.config.output_bias) == (True, False)
        assert one.config.windows == ()  # no effect without use_sliding_window
    edit_config(qwen2, use_sliding_window=True, layer_types=...)
    with open_checkpoint(qwen2) as one:
        assert one.config.windows == (0, 4096)


def test_tensor_missing_left_over_or_misnamed(llama: Path) -> None:
    norm = np.ones(64, np.float32)
    edit_tensors(llama, model__norm__weight=None, model__final_norm__weight=norm)
    with pytest.raises(
        LoadError, match=r"missing model\.norm\.weight; unexpected model\.final_norm\.weight"
    ):
        open_checkpoint(llama)


def test_stored_rotary_frequencies_are_of_no_use(llama: Path) -> None:
    name = "model__layers__1__self_attn__rotary_emb__inv_freq"
    edit_tensors(llama, **{name: np.zeros(8, np.float32)})
    with open_checkpoint(llama) as checkpoint:
        assert len(values(checkpoint)) == 21


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_dtype_of_a_tensor(llama: Path, dtype: type) -> None:
    edit_tensors(llama, model__norm__weight=np.ones(64, dtype))
    with pytest.raises(LoadError, match=r"model\.norm\.weight: expected one of bfloat16, .*got "):
        open_checkpoint(llama)


def test_ties(tmp_path: Path) -> None:
    """All four cases of the flag and the tensor, and whether both tables are equal."""
    path = tiny.tiny_llama(tmp_path, tie=False)
    with open_checkpoint(path) as checkpoint:  # false + present
        assert not checkpoint.config.tied_embeddings
        tensors = values(checkpoint)
    edit_config(path, tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"tie_word_embeddings is true, but lm_head\.weight is st"):
        open_checkpoint(path)  # true + present and different
    edit_tensors(path, lm_head__weight=tensors["embedding"])
    with open_checkpoint(path) as checkpoint:  # true + present and equal
        assert checkpoint.config.tied_embeddings
        assert "lm_head" not in values(checkpoint)
    edit_tensors(path, lm_head__weight=tensors["embedding"].astype(np.float16))
    with pytest.raises(LoadError, match="tie_word_embeddings"):
        open_checkpoint(path)
    edit_tensors(path, lm_head__weight=None)
    with open_checkpoint(path) as checkpoint:  # true + absent
        assert checkpoint.config.tied_embeddings
    for flag in (False, ...):
        edit_config(path, tie_word_embeddings=flag)
        with pytest.raises(LoadError, match=r"missing lm_head\.weight"):
            open_checkpoint(path)  # false + absent


def test_missing_and_extra_shards(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path, sharded=True)
    shards = sorted(path.glob("*.safetensors"))
    extra = path / "model-00009-of-00009.safetensors"
    extra.write_bytes(shards[0].read_bytes())
    with pytest.warns(UserWarning, match=extra.name), open_checkpoint(path) as checkpoint:
        assert len(values(checkpoint)) == 21
    extra.unlink()
    last = shards[-1].read_bytes()
    shards[-1].unlink()
    with pytest.raises(LoadError, match=f"missing shard: {shards[-1].name}"):
        open_checkpoint(path)
    shards[-1].write_bytes(last)

    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    moved = {**index["weight_map"], "model.norm.weight": shards[0].name}
    moved["lm_head.weight"] = shards[-1].name
    index_file.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(LoadError, match=r"expected tensor .*, as the index says, got none"):
        open_checkpoint(path)
    for broken in ({}, {"weight_map": {}}, {"weight_map": {"a": "../x.safetensors"}}, [], "x"):
        index_file.write_text(json.dumps(broken))
        with pytest.raises(LoadError, match=r"index\.json"):
            open_checkpoint(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = tiny.tiny_llama(tmp_path, sharded=True)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    by_file: dict[str, list[str]] = {}
    for name, file in index.items():
        by_file.setdefault(file, []).append(name)
    from safetensors.numpy import load_file, save_file

    one, two = sorted(by_file)[:2]
    state = load_file(path / two)
    name = by_file[one][0]
    state[name] = load_file(path / one)[name]
    save_file(state, path / two)
    with pytest.raises(LoadError, match="is in another file too"):
        open_checkpoint(path)


def test_damaged_safetensors(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    # Cut within the length, the header, the first tensor, and one byte short.
    for length in (0, 5, 8, 8 + header // 2, 8 + header, 8 + header + 3, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            open_checkpoint(llama)
    for damaged in (
        struct.pack("<Q", 1 << 62) + whole[8:],
        whole[:8] + b"\xff" * 40 + whole[48:],
        whole[:8] + b"[" + whole[9:],
        b"\0" * 64,
    ):
        file.write_bytes(damaged)
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            open_checkpoint(llama)


def test_targets_that_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (tmp_path / "none", str(tmp_path / "none.gguf"), "./none", "a/b/c", "none.gguf"):
        with pytest.raises(LoadError, match="no such file or folder"):
            open_checkpoint(target)
    with pytest.raises(LoadError, match=r"expected a config\.json or a \.gguf file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"\[config\.json\] cannot be read as JSON"):
        open_checkpoint(tmp_path)
    with pytest.raises(LoadError, match="another file"):
        open_checkpoint(tmp_path / "config.json")
    tiny.tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"expected model\.safetensors, pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    for wrong in (None, 7, object()):
        with pytest.raises(InvalidArgumentError, match="target"):
            open_checkpoint(wrong)
    with pytest.raises(InvalidArgumentError, match="max_model_len"):
        open_checkpoint(tmp_path, max_model_len=0)


def test_closed_checkpoint_reads_no_more(llama: Path) -> None:
    checkpoint = open_checkpoint(llama)
    first = next(checkpoint.tensors())
    checkpoint.close()
    checkpoint.close()
    assert np.isfinite(first.array).all()
    with pytest.raises(LoadError, match="closed"):
        next(checkpoint.tensors())


def test_pickles_without_torch_say_what_to_install(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from specrt.loading import open_checkpoint\n"
        "from specrt.errors import UnsupportedError\n"
        f"try: open_checkpoint({str(llama)!r})\n"
        "except UnsupportedError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install torch" in done.stdout
