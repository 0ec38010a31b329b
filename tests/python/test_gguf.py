"""GGUF files: the container, the config, the tensors, and the demo model against transformers."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from test_loading import same, values

from specrt.errors import LoadError
from specrt.loading import open_checkpoint
from specrt.loading.family import LLAMA_NAMES
from specrt.loading.gguf_file import GgufFile
from specrt.loading.gguf_model import NAMES as GGUF_NAMES
from specrt.loading.rope import default_inv_freq, llama3_inv_freq

LLAMA_KEYS: dict[str, Any] = {
    "context_length": 2048,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 16,
    "vocab_size": 128,
}


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    kind: str = "F32",
    general: dict[str, Any] | None = None,
) -> Path:
    """A .gguf file; matrices are stored as `kind`, vectors as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    stated = {
        f"{architecture}.{key}": value for key, value in {**LLAMA_KEYS, **(keys or {})}.items()
    }
    for key, value in {**stated, **(general or {})}.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        type_ = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows of the llama architecture."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def converted(path: Path, *, heads: int = 4, kv_heads: int = 2) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under GGUF names, converted as llama.cpp does."""
    with open_checkpoint(path, dtype="float32") as checkpoint:
        found = {}
        for canonical, array in values(checkpoint).items():
            part = canonical.removesuffix(".bias").rpartition(".")[2]
            if checkpoint.config.family == "llama" and part in "qk":
                array = interleave(array, heads if part == "q" else kv_heads)
            name = canonical
            if canonical.startswith("layers."):
                layer = canonical.split(".")[1]
                template = canonical.replace(f"layers.{layer}.", "layers.{i}.")
                name = GGUF_NAMES[template].replace("{i}", layer)
            else:
                name = GGUF_NAMES[canonical]
            found[name] = array
        return found


@pytest.fixture
def llama(tmp_path: Path) -> dict[str, np.ndarray]:
    return converted(tiny.tiny_llama(tmp_path / "hf"))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_llama_round_trip(tmp_path: Path, tie: bool, bias: bool) -> None:
    path = tiny.tiny_llama(tmp_path / "hf", tie=tie, attention_bias=bias, mlp_bias=bias)
    file = write(tmp_path / "a.gguf", converted(path))
    with open_checkpoint(path) as want, open_checkpoint(file) as got:
        assert got.kind == "gguf"
        assert got.config == want.config
        assert got.dtype == "float32"
        assert got.load_tokenizer() is None
        same(values(got), values(want))
    with open_checkpoint(tmp_path) as checkpoint:  # a folder with one .gguf file
        assert checkpoint.kind == "gguf"
    write(tmp_path / "b.gguf", converted(path))
    with pytest.raises(LoadError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tie", [False, True])
def test_qwen2_round_trip(tmp_path: Path, tie: bool) -> None:
    path = tiny.tiny_qwen2(tmp_path / "hf", tie=tie)
    keys = {"vocab_size": None, "rope.freq_base": 1000000.0, "context_length": 2048}
    file = write(tmp_path / "a.gguf", converted(path), architecture="qwen2", keys=keys)
    with open_checkpoint(path) as want, open_checkpoint(file) as got:
        assert got.config == want.config
        same(values(got), values(want))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_matrices(tmp_path: Path, llama: dict[str, np.ndarray], kind: str) -> None:
    type_ = GGMLQuantizationType[kind]
    file = write(tmp_path / "a.gguf", llama, kind=kind)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, type_), type_)
        if array.ndim == 2
        else array
        for name, array in llama.items()
    }
    plain = write(tmp_path / "b.gguf", rounded)
    with open_checkpoint(file) as got, open_checkpoint(plain) as want:
        assert got.dtype == "bfloat16"
        assert {tensor.dtype for tensor in got.tensors()} == {"float32"}
        same(values(got), values(want))


def dequantisable() -> list[str]:
    able = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        except ValueError:
            pass
        able.append(kind.name)
    return able


@pytest.mark.parametrize("kind", dequantisable())
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_every_type_that_gguf_dequantises(tmp_path: Path, kind: str) -> None:
    type_ = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[type_]
    rows = np.random.default_rng(0).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", rows, raw_shape=(3, 2 * size), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "a.gguf")
    assert file.entries["w"].shape == (3, 2 * block)
    assert file.entries["w"].dtype in file.loadable
    [theirs] = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    want = gguf.quants.dequantize(theirs.data, type_).reshape(3, 2 * block)
    got = file.read("w")
    assert got.dtype == np.float32
    assert np.array_equal(got, want, equal_nan=True)


def test_types_that_gguf_cannot_dequantise(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    path = write(tmp_path / "a.gguf", llama)
    data = bytearray(path.read_bytes())
    # A tensor header ends in two dimensions, the type and the offset.
    at = data.index(b"blk.0.attn_k.weight") + len("blk.0.attn_k.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", GGMLQuantizationType.I32)
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"blk\.0\.attn_k\.weight: expected one of .*got I32"):
        open_checkpoint(path)
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    with pytest.raises(LoadError, match="unknown type 999"):
        open_checkpoint(path)


def test_rope_factors_of_llama3(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    parameters = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    want = llama3_inv_freq(10000.0, 16, parameters, 2048)
    factors = default_inv_freq(10000.0, 16) / want
    file = write(tmp_path / "a.gguf", {**llama, "rope_freqs.weight": factors})
    with open_checkpoint(file) as checkpoint:
        got = np.array(checkpoint.config.rope_inv_freq, np.float32)
        assert np.allclose(got, want, rtol=2e-7, atol=0)
        assert len(values(checkpoint)) == 21
    for wrong in (factors[:-1], -factors):
        file = write(tmp_path / "b.gguf", {**llama, "rope_freqs.weight": wrong})
        with pytest.raises(LoadError, match=r"rope_freqs\.weight"):
            open_checkpoint(file)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"scaling\.type.*'yarn'"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, r"scaling\.type.*'linear'"),
        ({"rope.scaling.factor": 4.0}, r"rope\.scaling\.factor"),
        ({"rope.scale_linear": 2.0}, r"rope\.scale_linear"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count.*expected 16"),
        ({"attention.value_length": 8}, r"attention\.value_length"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention.sliding_window": 512}, "sliding_window"),
        ({"attention.scale": 0.5}, r"attention\.scale"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"attn_logit_softcapping": 50.0}, "softcapping"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"attention.head_count": 0}, "head_count"),
        ({"embedding_length": None}, "embedding_length"),
        ({"block_count": 1}, r"unexpected blk\.1\."),
        ({"block_count": 3}, r"missing blk\.2\."),
        ({"vocab_size": 100}, r"token_embd\.weight: expected shape"),
        ({"rope.freq_base": -1.0}, r"rope\.freq_base"),
    ],
)
def test_metadata_refused_by_name(
    tmp_path: Path, llama: dict[str, np.ndarray], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(LoadError, match=says):
        open_checkpoint(write(tmp_path / "a.gguf", llama, keys=keys))


def test_metadata_that_changes_nothing(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    keys = {
        "rope.scaling.type": "none", "expert_count": 0, "rope.scale_linear": 1.0,
        "attention.head_count_kv": [2, 2], "attention.key_length": 16, "logit_scale": 1.0,
    }  # fmt: skip
    with open_checkpoint(write(tmp_path / "a.gguf", llama, keys=keys)) as checkpoint:
        assert checkpoint.config.num_kv_heads == 2


def test_architectures_and_tensors_refused(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    with pytest.raises(LoadError, match="unknown GGUF architecture 'mamba'; known: llama, qwen2"):
        open_checkpoint(write(tmp_path / "a.gguf", llama, architecture="mamba"))
    extra = {**llama, "blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(LoadError, match=r"unexpected blk\.0\.attn_q_norm\.weight"):
        open_checkpoint(write(tmp_path / "b.gguf", extra))
    del llama["blk.1.ffn_up.weight"]
    with pytest.raises(LoadError, match=r"missing blk\.1\.ffn_up\.weight"):
        open_checkpoint(write(tmp_path / "c.gguf", llama))
    with pytest.raises(LoadError, match="one of 3 parts"):
        open_checkpoint(write(tmp_path / "d.gguf", llama, general={"split.count": 3}))


def test_end_tokens(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    general = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
    }
    with open_checkpoint(write(tmp_path / "a.gguf", llama, general=general)) as checkpoint:
        assert checkpoint.eos_token_ids == (2, 7)
        assert checkpoint.bos_token_id == 1
    with open_checkpoint(write(tmp_path / "b.gguf", llama)) as checkpoint:
        assert checkpoint.eos_token_ids == ()
        assert checkpoint.bos_token_id is None


def test_damaged_files(tmp_path: Path, llama: dict[str, np.ndarray]) -> None:
    path = write(tmp_path / "a.gguf", llama, general={"tokenizer.ggml.tokens": ["a", "b"] * 64})
    whole = path.read_bytes()
    header = GgufFile(path)
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 128
    lengths = [0, 3, 7, 23, *range(24, len(whole) // 8, 97), len(whole) // 2, len(whole) - 40]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"a\.gguf"):
            open_checkpoint(path)
    wrong = (
        b"GGML" + whole[4:],
        whole[:4] + struct.pack("<I", 1) + whole[8:],
        whole[:4] + struct.pack(">I", 3) + whole[8:],
        whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:],
        whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:],
        whole[:24] + struct.pack("<Q", 1 << 60) + whole[32:],
    )
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises(LoadError, match=r"a\.gguf"):
            open_checkpoint(path)
    generator = np.random.default_rng(0)
    end = whole.index(b"token_embd.weight") + 200
    for _ in range(200):  # bytes of the header changed at random: an error or a checkpoint
        data = bytearray(whole)
        for at in generator.integers(0, end, 3):
            data[at] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            with open_checkpoint(path) as checkpoint:
                list(checkpoint.tensors())
        except LoadError:
            pass


def test_container_agrees_with_the_gguf_package(
    tmp_path: Path, llama: dict[str, np.ndarray]
) -> None:
    general = {
        "a.string": "höher", "a.bool": True, "a.float": 0.5, "an.array": [1, 2, 3],
        "strings": ["x", "", "日本"], "general.alignment": 64,
    }  # fmt: skip
    path = write(tmp_path / "a.gguf", llama, general=general)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name
    assert [tensor.name for tensor in theirs.tensors] == list(ours.entries)
    for tensor in theirs.tensors:
        assert np.array_equal(ours.read(tensor.name), tensor.data), tensor.name


@pytest.fixture(scope="session")
def demo_model() -> Path:
    from specrt.demo import demo_model_path

    return demo_model_path()


def test_demo_model_needs_no_torch(demo_model: Path) -> None:
    script = (
        "import sys; from specrt.loading import open_checkpoint\n"
        f"c = open_checkpoint({str(demo_model)!r})\n"
        "print(sum(t.array.size for t in c.tensors()), c.dtype, c.eos_token_ids)\n"
        "print(c.load_tokenizer().apply_chat_template([{'role': 'user', 'content': 'hi'}])[:3])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["134515008 bfloat16 (2,)", "[1, 9690, 198]"]


def test_demo_model_is_what_transformers_loads(demo_model: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with open_checkpoint(demo_model) as checkpoint:
        config = checkpoint.config
    stated = LlamaConfig(num_hidden_layers=config.num_layers, vocab_size=config.vocab_size)
    with torch.device("meta"):
        empty = LlamaForCausalLM(stated)  # only its names are used
    # What from_pretrained(gguf_file=...) does, without its need for accelerate.
    loaded = load_gguf_checkpoint(demo_model, return_tensors=True, model_to_load=empty)
    hf, state = LlamaConfig(**loaded["config"]), loaded["tensors"]
    assert (config.vocab_size, config.num_layers) == (hf.vocab_size, hf.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (
        hf.num_attention_heads,
        hf.num_key_value_heads,
    )
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.head_dim == hf.head_dim
    assert config.tied_embeddings == hf.tie_word_embeddings
    assert np.float32(config.norm_eps) == np.float32(hf.rms_norm_eps)
    theta = hf.rope_parameters["rope_theta"]
    assert config.rope_inv_freq == tuple(default_inv_freq(theta, 64).tolist())
    with open_checkpoint(demo_model) as checkpoint:
        seen = set()
        for tensor in checkpoint.tensors():
            name = LLAMA_NAMES.get(tensor.name)
            if name is None:
                _, layer, rest = tensor.name.split(".", 2)
                name = LLAMA_NAMES[f"layers.{{i}}.{rest}"].replace("{i}", layer)
            assert np.array_equal(tensor.array, state[name].numpy()), tensor.name
            seen.add(name)
        assert seen == set(state)
