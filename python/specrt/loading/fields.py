"""What a model is, in the core's own terms: the Python twin of `specrt::ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import LoadError

__all__ = ["MOST", "ModelFields", "tensor_shapes"]


# The core's own bounds: wide enough for anything real.
MOST = {
    "vocab_size": 2**31 - 1,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": 4096,
    "num_heads": 2**16,
    "head_dim": 512,
    "max_position_embeddings": 2**31 - 1,
}


@dataclass(frozen=True)
class ModelFields:
    """Everything that decides a decoder-only transformer's arithmetic.

    Field for field what `specrt::ModelConfig` holds. `rope_inv_freq` are fp32 values with any
    scaling already applied, one for each rotated pair of dimensions: fewer than head_dim / 2
    rotate only the first dimensions of a head. `rope_local_inv_freq` () means the same for layers
    with a window; `rope_scale` multiplies cos and sin of the others. `windows` has a value for each
    layer, 0 for none, or is (). `attention_scale` 0 means 1 / sqrt(head_dim), a soft cap 0 none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    attention_scale: float = 0.0
    rope_scale: float = 1.0
    rope_local_inv_freq: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    qk_norm: Literal["none", "head", "whole"] = "none"
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False

    def check(self) -> None:
        """Raise LoadError naming the first field that does not fit the others."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise LoadError(f"[{name}] expected at least 1, got {getattr(self, name)}")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise LoadError(f"[{name}] expected at most {most}, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"[num_kv_heads] expected a divisor of num_heads ({self.num_heads}), "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise LoadError(f"[head_dim] expected an even number, got {self.head_dim}")
        if not 1 <= len(self.rope_inv_freq) <= self.head_dim // 2:
            raise LoadError(
                f"[rope_inv_freq] expected 1 to {self.head_dim // 2} values, "
                f"got {len(self.rope_inv_freq)}"
            )
        for name, count in (
            ("rope_local_inv_freq", len(self.rope_inv_freq)),
            ("windows", self.num_layers),
        ):
            if len(getattr(self, name)) not in (0, count):
                raise LoadError(
                    f"[{name}] expected none or {count} values, got {len(getattr(self, name))}"
                )
        if not 0.0 < self.norm_eps < math.inf:
            raise LoadError(f"[norm_eps] expected a positive number, got {self.norm_eps}")


def tensor_shapes(fields: ModelFields) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the core has to be given, in its order."""
    hidden, ffn = fields.hidden_size, fields.intermediate_size
    q_rows, kv_rows = fields.num_heads * fields.head_dim, fields.num_kv_heads * fields.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (fields.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[name] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    before = fields.norm_placement != "post"
    behind = fields.norm_placement != "pre"
    whole = fields.qk_norm == "whole"
    for layer in range(fields.num_layers):
        prefix = f"layers.{layer}."
        if before:
            shapes[f"{prefix}attention_norm"] = (hidden,)
        if behind:
            shapes[f"{prefix}attention_post_norm"] = (hidden,)
        linear(f"{prefix}attention.q", q_rows, hidden, fields.qkv_bias)
        linear(f"{prefix}attention.k", kv_rows, hidden, fields.qkv_bias)
        linear(f"{prefix}attention.v", kv_rows, hidden, fields.qkv_bias)
        linear(f"{prefix}attention.o", hidden, q_rows, fields.output_bias)
        if fields.qk_norm != "none":
            shapes[f"{prefix}attention.q_norm"] = (q_rows if whole else fields.head_dim,)
            shapes[f"{prefix}attention.k_norm"] = (kv_rows if whole else fields.head_dim,)
        if before:
            shapes[f"{prefix}mlp_norm"] = (hidden,)
        if behind:
            shapes[f"{prefix}mlp_post_norm"] = (hidden,)
        linear(f"{prefix}mlp.gate", ffn, hidden, fields.mlp_bias)
        linear(f"{prefix}mlp.up", ffn, hidden, fields.mlp_bias)
        linear(f"{prefix}mlp.down", hidden, ffn, fields.mlp_bias)
    shapes["norm"] = (hidden,)
    if not fields.tied_embeddings:
        shapes["lm_head"] = (fields.vocab_size, hidden)
    return shapes
