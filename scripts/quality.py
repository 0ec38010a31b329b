"""What int8, int4 and w8a8 cost: the perplexity of a page of text, beside bfloat16's.

    python scripts/quality.py [FILE]

The model is the demo model (SmolLM2-135M-Instruct), with a catch: its file is Q4_1, so its weights
lie exactly on an int4 grid of 32 inputs, and int4 with the same groups would lose nothing. So the
channels are renamed first: one random permutation of the residual stream, one of each MLP's inner
channels and one within each value head, applied to whatever writes them and whatever reads them.
The function stays the same, up to the order of sums, but every group of 32 now holds weights out
of many of the old groups, on no common grid. The row "on its own grid" shows the trap.

"int4, with a text" is what `specrt.quantize` makes of bench/quality/calibration.txt, which has no
sentence of the page. "int4, plain rounding" is what the core's own rounding is measured by: the
same groups, rounded to the nearest of 16 steps between minimum and maximum, everything else
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from specrt import Engine, SamplingParams, Tokenizer, quantize
from specrt.demo import demo_model_path
from specrt.loading import open_checkpoint
from specrt.loading.families import FAMILIES
from specrt.loading.quantised import to_bfloat16
from specrt.loading.source import as_float32

PAGE = Path(__file__).resolve().parents[1] / "bench" / "quality" / "page.txt"
CALIBRATION = PAGE.with_name("calibration.txt")
GROUP = 32

Weights = dict[str, NDArray[np.float32]]


def permuted(weights: Weights, heads: int, kv_heads: int, seed: int = 0) -> Weights:
    """The same model with its channels in another order; names are canonical."""
    draw = np.random.default_rng(seed)
    hidden = draw.permutation(weights["norm"].size)
    result = dict(weights)
    for name, array in weights.items():
        last = name.rpartition(".")[2]
        if array.ndim == 1 or last in ("embedding", "q", "k", "v", "gate", "up"):
            result[name] = array[..., hidden]
    layers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    for layer in sorted(layers):
        mlp, attention = f"layers.{layer}.mlp.", f"layers.{layer}.attention."
        inner = draw.permutation(len(weights[mlp + "gate"]))
        for part in ("gate", "up"):
            result[mlp + part] = result[mlp + part][inner]
        result[mlp + "down"] = weights[mlp + "down"][hidden][:, inner]
        size = len(weights[attention + "v"]) // kv_heads
        rows = [draw.permutation(size) + head * size for head in range(kv_heads)]
        result[attention + "v"] = result[attention + "v"][np.concatenate(rows)]
        each = heads // kv_heads
        columns = [rows[head // each] % size + head * size for head in range(heads)]
        result[attention + "o"] = weights[attention + "o"][hidden][:, np.concatenate(columns)]
    return result


def plainly_rounded(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """int4 by rounding to the nearest: minimum and scale of each group are its range's, in fp16."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((groups.max(-1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - low) / np.where(scale > 0, scale, 1)), 0, 15)
    rounded: NDArray[np.float32] = (codes * scale + low).reshape(weight.shape)
    return rounded


def write(path: Path, weights: Weights, config: dict[str, object]) -> Path:
    """A Llama checkpoint in bfloat16."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    names = FAMILIES["llama"].names
    header: dict[str, object] = {}
    data = []
    end = 0
    for name, array in weights.items():
        template = name
        layer = ""
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            template = f"layers.{{i}}.{rest}"
        data.append(to_bfloat16(np.ascontiguousarray(array)))
        header[names[template].replace("{i}", layer)] = {
            "dtype": "BF16",
            "shape": array.shape,
            "data_offsets": [end, end + 2 * array.size],
        }
        end += 2 * array.size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in data:
            file.write(bits.data)
    return path


def read_demo() -> tuple[Weights, dict[str, object], Tokenizer]:
    with open_checkpoint(demo_model_path()) as checkpoint:
        weights = {one.name: as_float32(one.array) for one in checkpoint.tensors()}
        fields, tokenizer = checkpoint.config, checkpoint.load_tokenizer()
    assert tokenizer is not None
    assert fields.tied_embeddings
    # The last frequency of head_dim / 2 tells theta.
    half = fields.head_dim // 2
    theta = float(fields.rope_inv_freq[-1]) ** (-half / (half - 1))
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.intermediate_size,
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.num_kv_heads,
        "max_position_embeddings": fields.max_position_embeddings,
        "rms_norm_eps": fields.norm_eps,
        "rope_theta": round(theta),
        "tie_word_embeddings": True,
    }
    return weights, config, tokenizer


def perplexity(path: Path, dtype: str, ids: list[int]) -> tuple[float, float, float]:
    """exp of the mean negative log-probability; seconds to load; MB of weights."""
    started = time.perf_counter()
    with Engine(path, dtype=dtype, max_model_len=len(ids) + 1, max_batch_size=1) as engine:
        seconds = time.perf_counter() - started
        size = engine.memory.target_weights / 1e6
        output = engine.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    total = 0.0
    for token, step in zip(ids, output.prompt_logprobs, strict=True):
        if step is not None:
            total += step[token].logprob
    return math.exp(-total / (len(ids) - 1)), seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=PAGE, help="the text")
    parser.add_argument("--seed", type=int, default=0, help="of the permutation")
    given = parser.parse_args()
    weights, config, tokenizer = read_demo()
    ids = tokenizer.encode(given.file.read_text(encoding="utf-8"))
    moved = permuted(
        weights, int(str(config["num_attention_heads"])), int(str(config["num_key_value_heads"])),
        given.seed,
    )  # fmt: skip
    linear = ("q", "k", "v", "o", "gate", "up", "down")
    plain = {
        name: plainly_rounded(array) if name.rpartition(".")[2] in linear else array
        for name, array in moved.items()
    }
    table = Table(title=f"{demo_model_path().stem}, channels permuted, {len(ids)} tokens")
    for column in ("weights", "perplexity", "beside bfloat16", "MB", "load, s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write(base / "moved", moved, config)
        write(base / "plain", plain, config)
        write(base / "own", weights, config)
        text = tokenizer.encode(CALIBRATION.read_text(encoding="utf-8"))
        quantize(base / "moved", text, base / "rounded.specrt")
        first = 0.0
        for name, path, dtype in (
            ("bfloat16", "moved", "bfloat16"),
            ("int8", "moved", "int8"),
            ("int4", "moved", "int4"),
            ("int4, with a text", "rounded.specrt", "int4"),
            ("int4, plain rounding", "plain", "bfloat16"),
            ("w8a8", "moved", "w8a8"),
            ("bfloat16, as it was", "own", "bfloat16"),
            ("int4, on its own grid", "own", "int4"),
        ):
            value, seconds, size = perplexity(base / path, dtype, ids)
            first = first or value
            change = f"{100 * (value / first - 1):+.2f} %"
            table.add_row(name, f"{value:.4f}", change, f"{size:.0f}", f"{seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
