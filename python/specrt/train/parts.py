"""What modules in training are made of, as the core computes it.

Products take inputs rounded to `dtype`; norms and the residual stream are float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from ..loading.source import Tensor as Stored

__all__ = ["attend", "matrix", "norm", "product_dtype", "rotary_tables", "rotate", "stored"]


def product_dtype(precision: str) -> torch.dtype:
    """Of products: "float32", "bfloat16", or "auto", bfloat16 where the processor has it."""
    if precision == "auto":
        from .. import _core

        fast = _core.resolve_cpu_isa("auto") == "amx" or bool(torch.cpu._is_avx512_bf16_supported())
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def stored(tensor: Stored) -> torch.Tensor:
    """A checkpoint's tensor, copied, in its own dtype."""
    array = torch.from_numpy(tensor.array.copy())
    return array.view(torch.bfloat16) if tensor.dtype == "bfloat16" else array


def matrix(
    shape: tuple[int, ...], generator: torch.Generator, scale: float | None = None
) -> torch.Tensor:
    """Normal random numbers, by default of a size that keeps an output's size."""
    spread = 1.0 / math.sqrt(shape[-1]) if scale is None else scale
    return torch.randn(shape, generator=generator) * spread


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary_tables(
    inv_freq: tuple[float, ...], positions: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, pairs]."""
    angles = torch.arange(positions).float()[:, None] * torch.tensor(inv_freq)[None]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [rows, heads, head_dim]; cos and sin are the rows' [rows, pairs]."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    one, two, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    further: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention of one text's rows over its positions, and over one row's own keys beyond them.

    q [rows, heads, dim]; k, v [positions, kv heads, dim]; hidden [rows, positions] is true where a
    row does not look; further are pairs of [rows, kv heads, dim], one key and value for each row.
    Gives [rows, heads * dim].
    """
    rows, heads, dim = q.shape
    positions, groups, _ = k.shape
    each = heads // groups
    # Query heads of a group side by side: [groups, each * rows, dim].
    own = q.view(rows, groups, each, dim).permute(1, 2, 0, 3).reshape(groups, each * rows, dim)
    own = own * (1.0 / math.sqrt(dim))
    scores = torch.bmm(own, k.permute(1, 2, 0)).float().view(groups, each, rows, positions)
    scores = scores.masked_fill(hidden, -math.inf)
    own = own.view(groups, each, rows, dim)
    if further:
        extra = [
            (own * one.permute(1, 0, 2)[:, None]).float().sum(-1, keepdim=True)
            for one, _ in further
        ]
        scores = torch.cat([scores, *extra], -1)
    shares = torch.softmax(scores, -1).to(v.dtype)
    out = torch.bmm(
        shares[..., :positions].reshape(groups, each * rows, positions), v.permute(1, 0, 2)
    ).view(groups, each, rows, dim)
    for at, (_, value) in enumerate(further):
        out = out + shares[..., positions + at, None] * value.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(rows, heads * dim)
