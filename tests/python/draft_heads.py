"""Tiny draft heads written as checkpoints, and a PyTorch restatement of what they compute."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # for rows of 64 numbers, more only wait for each other

Tensors = dict[str, torch.Tensor]
MTP_KINDS = ("mimo", "qwen3_next", "deepseek")


@dataclass
class Head:
    """A random head: sizes, which parts it has, and what they hold (plain names)."""

    kind: str  # "eagle", "eagle3", "mimo", "qwen3_next", "deepseek"
    hidden: int = 64
    target_hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 128
    draft_vocab: int = 0
    layers: int = 1
    parts: int = 3
    theta: float = 10000.0
    eps: float = 1e-5
    window: int = 0
    flags: set[str] = field(default_factory=set)
    seed: int = 0
    tensors: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

        def norm(size: int) -> torch.Tensor:
            return 1.0 + 0.1 * torch.randn(size, generator=generator)

        t, h, eagle3 = self.tensors, self.hidden, self.kind == "eagle3"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        features = self.parts * self.target_hidden if eagle3 else h
        if "no_fc" not in self.flags:
            t["fc.weight"] = matrix(h, features if eagle3 else 2 * h)
        if "fc_bias" in self.flags:
            t["fc.bias"] = 0.3 * torch.randn(h, generator=generator)
        if "input_norm" in self.flags:
            t["input_norm.weight"] = norm(features)
        if "part_norms" in self.flags:
            for part in range(self.parts):
                t[f"fc_norm.{part}.weight"] = norm(self.target_hidden)
        if self.kind in MTP_KINDS:
            t["embedding_norm"], t["hidden_norm"] = norm(h), norm(h)
        for layer in range(self.layers):
            p = f"layers.{layer}."
            if eagle3 and layer == 0:
                t[p + "hidden_norm.weight"] = norm(h)
            if self.kind != "eagle" or layer > 0 or "first_norm" in self.flags:
                t[p + "input_layernorm.weight"] = norm(h)
            inputs = 2 * h if eagle3 and layer == 0 else h
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                t[p + f"self_attn.{name}_proj.weight"] = matrix(rows, inputs)
                if "qkv_bias" in self.flags:
                    t[p + f"self_attn.{name}_proj.bias"] = 0.3 * torch.randn(
                        rows, generator=generator
                    )
            if "qk_norm" in self.flags:
                t[p + "self_attn.q_norm.weight"] = norm(self.head_dim)
                t[p + "self_attn.k_norm.weight"] = norm(self.head_dim)
            t[p + "self_attn.o_proj.weight"] = matrix(h, q)
            t[p + "post_attention_layernorm.weight"] = norm(h)
            t[p + "mlp.gate_proj.weight"] = matrix(self.ffn, h)
            t[p + "mlp.up_proj.weight"] = matrix(self.ffn, h)
            t[p + "mlp.down_proj.weight"] = matrix(h, self.ffn)
        if self.kind != "eagle" or "final_norm" in self.flags:
            t["norm.weight"] = norm(h)
        if "embedding" in self.flags:
            t["embed_tokens.weight"] = torch.randn(self.vocab, h, generator=generator)
        rows = self.draft_vocab or self.vocab
        if "lm_head" in self.flags or self.draft_vocab:
            t["lm_head.weight"] = matrix(rows, h, 6.0)
        if self.draft_vocab:
            ids = torch.randperm(self.vocab, generator=generator)[:rows].sort().values
            t["d2t"] = ids - torch.arange(rows)
            mask = torch.zeros(self.vocab, dtype=torch.bool)
            mask[ids] = True
            t["t2d"] = mask

    def config(self, **more: Any) -> dict[str, Any]:
        """The config.json of an EAGLE head."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "hidden_act": "silu",
        }
        if self.kind == "eagle3":
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            config["draft_vocab_size"] = self.draft_vocab or self.vocab
            for flag, key in (
                ("norm_before_residual", "norm_before_residual"),
                ("norm_output", "norm_output"),
                ("input_norm", "norm_before_fc"),
                ("part_norms", "fc_norm"),
            ):
                if flag in self.flags:
                    config[key] = True
        return {**config, **more}

    def stored(self, *, midlayer: bool = True, prefix: str = "", vllm: bool = False) -> Tensors:
        """The tensors under the names of a layout."""
        out = {}
        for name, tensor in self.tensors.items():
            if vllm and name == "t2d":
                continue
            one = {"d2t": "draft_id_to_target_id"}.get(name, name) if vllm else name
            if midlayer and self.kind == "eagle3" and one.startswith("layers.0."):
                one = "midlayer." + one.removeprefix("layers.0.")
            out[one if one in ("d2t", "t2d") else prefix + one] = tensor
        return out


def write(path: Path, config: dict[str, Any], tensors: Tensors, *, pickled: bool = False) -> Path:
    """A checkpoint folder of these tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(
            {one: t.contiguous().clone() for one, t in tensors.items()}, path / "model.safetensors"
        )
    return path


@dataclass
class Entry:
    """What one row leaves behind: its keys and values, a pair a layer, and its position."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    position: int


class Restated:
    """The published modules, one row at a time, in float32."""

    def __init__(self, head: Head, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.head, t = head, head.tensors
        self.embedding = t.get("embed_tokens.weight", embedding)
        self.lm_head = t.get("lm_head.weight", lm_head)
        self.inv_freq = 1.0 / head.theta ** (
            torch.arange(0, head.head_dim, 2, dtype=torch.float32) / head.head_dim
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.head.eps) * weight

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        angle = torch.cat([position * self.inv_freq] * 2)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angle.cos() + turned * angle.sin()

    def attend(self, x: torch.Tensor, layer: int, position: int, before: list[Entry]) -> Any:
        h, t, p = self.head, self.head.tensors, f"layers.{layer}.self_attn."

        def project(name: str, heads: int) -> torch.Tensor:
            out = t[p + f"{name}_proj.weight"] @ x
            if p + f"{name}_proj.bias" in t:
                out = out + t[p + f"{name}_proj.bias"]
            return out.view(heads, h.head_dim)

        q, k = project("q", h.heads), project("k", h.kv_heads)
        v = project("v", h.kv_heads)
        if p + "q_norm.weight" in t:
            q, k = self.norm(q, t[p + "q_norm.weight"]), self.norm(k, t[p + "k_norm.weight"])
        q, k = self.rotate(q, position), self.rotate(k, position)
        seen = [
            one.pairs[layer] for one in before if not h.window or position - one.position < h.window
        ] + [(k, v)]
        group = h.heads // h.kv_heads
        keys = torch.stack([one[0] for one in seen]).repeat_interleave(group, 1)
        values = torch.stack([one[1] for one in seen]).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q, keys) / h.head_dim**0.5, -1)
        out = torch.einsum("hn,nhd->hd", weights, values).reshape(-1)
        return t[p + "o_proj.weight"] @ out, (k, v)

    def row(
        self, token: int, hidden: torch.Tensor, recycled: bool, position: int, before: list[Entry]
    ) -> tuple[torch.Tensor, torch.Tensor, Entry]:
        """(the state that is fed back, logits, what later rows attend to)."""
        h, t = self.head, self.head.tensors
        embedded = self.embedding[token]
        if h.kind == "eagle3":
            x = hidden
            if not recycled and "fc.weight" in t:
                if "input_norm.weight" in t:
                    x = self.norm(x, t["input_norm.weight"])
                if "fc_norm.0.weight" in t:
                    x = torch.cat([
                        self.norm(one, t[f"fc_norm.{i}.weight"])
                        for i, one in enumerate(x.chunk(h.parts))
                    ])  # fmt: skip
                x = t["fc.weight"] @ x
            normed = self.norm(x, t["layers.0.hidden_norm.weight"])
            if "norm_before_residual" in h.flags:
                x = normed
            first = torch.cat([self.norm(embedded, t["layers.0.input_layernorm.weight"]), normed])
        else:
            if h.kind == "deepseek" and position == 0:
                embedded = torch.zeros_like(embedded)
            if "embedding_norm" in t:
                embedded = self.norm(embedded, t["embedding_norm"])
                hidden = self.norm(hidden, t["hidden_norm"])
            pair = [hidden, embedded] if h.kind == "mimo" else [embedded, hidden]
            x = t["fc.weight"] @ torch.cat(pair)
            if "fc.bias" in t:
                x = x + t["fc.bias"]
            first = x
            if "layers.0.input_layernorm.weight" in t:
                first = self.norm(x, t["layers.0.input_layernorm.weight"])
        pairs = []
        for layer in range(h.layers):
            p = f"layers.{layer}."
            into = first if layer == 0 else self.norm(x, t[p + "input_layernorm.weight"])
            attended, pair_kv = self.attend(into, layer, position, before)
            pairs.append(pair_kv)
            x = x + attended
            into = self.norm(x, t[p + "post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(t[p + "mlp.gate_proj.weight"] @ into)
            x = x + t[p + "mlp.down_proj.weight"] @ (gate * (t[p + "mlp.up_proj.weight"] @ into))
        normed = self.norm(x, t["norm.weight"]) if "norm.weight" in t else x
        back = normed if "norm_output" in h.flags or h.kind in MTP_KINDS else x
        return back, self.lm_head @ normed, Entry(pairs, position)

    def draft(
        self, tokens: list[int], features: torch.Tensor, nodes: int, levels: int, top_k: int
    ) -> dict[tuple[int, ...], float]:
        """EAGLE-2's tree behind `tokens`: path from the root -> log-probability of its last token.

        `features` [len(tokens) - 1, ...] are the target's at all positions but the last.
        """
        committed: list[Entry] = []
        for i, feature in enumerate(features):
            back, logits, entry = self.row(tokens[i + 1], feature, False, i, committed)
            committed.append(entry)
        d2t = self.head.tensors.get("d2t")
        # (path, score, log-probability), and of a frontier its state and what it attends to.
        candidates: list[tuple[tuple[int, ...], float, float]] = []

        def propose(path: tuple[int, ...], score: float, logits: torch.Tensor) -> list[Any]:
            values, ids = torch.log_softmax(logits, -1).topk(top_k)
            out = []
            for value, one in zip(values.tolist(), ids.tolist(), strict=True):
                token = one if d2t is None else one + int(d2t[one])
                out.append(((*path, token), score + value, value))
            return out

        level = propose((), 0.0, logits)
        candidates += level
        states = {(): (back, committed)}
        for _ in range(levels - 1):
            frontier = sorted(level, key=lambda one: -one[1])[:top_k]
            level, states_next = [], {}
            for path, score, _ in frontier:
                state, before = states[path[:-1]]
                position = len(features) + len(path) - 1
                out, logits, entry = self.row(path[-1], state, True, position, before)
                states_next[path] = (out, [*before, entry])
                level += propose(path, score, logits)
            states = states_next
            candidates += level
        best = sorted(candidates, key=lambda one: -one[1])[:nodes]
        return {path: value for path, _, value in best}


class Chained:
    """Sequential modules (DeepSeek-V3's report, section 2.2), by whole texts."""

    def __init__(self, modules: list[Restated]) -> None:
        self.modules = modules
        self.made: dict[tuple[int, ...], Any] = {}  # rows by all that they follow from

    def next_log_probs(
        self, tokens: list[int], features: torch.Tensor, path: tuple[int, ...]
    ) -> torch.Tensor:
        """Of the token behind `tokens` and `path`; `features` as in `Restated.draft`."""
        text, last = [*tokens, *path], len(features) - 1
        states = list(features)
        for k, module in enumerate(self.modules[: len(path) + 1], 1):
            entries: list[Entry] = []
            made = []
            # Position i reads what the module before made of it, and token i + k; behind the last
            # position that has one, what this module made of the position before.
            for i in range(len(text) - k):
                if i > last and k < min(len(self.modules), len(path) + 1):
                    break
                hidden = states[i] if i <= last else made[-1]
                key = (len(features), k, *text[: i + k + 1])
                if key not in self.made:
                    self.made[key] = module.row(text[i + k], hidden, i > last, i, entries)
                back, logits, entry = self.made[key]
                made.append(back)
                entries.append(entry)
            states = made
        return torch.log_softmax(logits, -1)

    def draft(
        self, tokens: list[int], features: torch.Tensor, nodes: int, levels: int, top_k: int
    ) -> dict[tuple[int, ...], float]:
        """As `Restated.draft`."""
        candidates: list[tuple[tuple[int, ...], float, float]] = []
        frontier: list[tuple[tuple[int, ...], float, float]] = [((), 0.0, 0.0)]
        for _ in range(levels):
            level = []
            for path, score, _value in frontier:
                values, ids = self.next_log_probs(tokens, features, path).topk(top_k)
                for value, one in zip(values.tolist(), ids.tolist(), strict=True):
                    level.append(((*path, one), score + value, value))
            candidates += level
            frontier = sorted(level, key=lambda one: -one[1])[:top_k]
        best = sorted(candidates, key=lambda one: -one[1])[:nodes]
        return {path: value for path, _, value in best}


def paths(tree: Any) -> dict[tuple[int, ...], float]:
    """A DraftTree in the same form."""
    found: list[tuple[int, ...]] = []
    out = {}
    for token, parent, value in zip(tree.tokens, tree.parents, tree.log_probs, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
        out[found[-1]] = value
    return out
