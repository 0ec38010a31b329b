"""Gemma 2 and 3: norms on both sides of each block, layers with and without a window.

Their norms multiply by 1 + weight. The sum is taken once, in fp32, when the weight is loaded; the
embedding's factor sqrt(hidden_size) stays in fp32 too, whatever precision the weights have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .family import family, layer_windows, names_without
from .family import decoder as shared
from .fields import ModelFields
from .hf_config import HfConfig
from .rope_config import Rope, read_rope, rope_of
from .source import as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GEMMA2_NAMES", "GEMMA3_NAMES", "text_part"]

_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
_MLP_BIASES = ("mlp.gate.bias", "mlp.up.bias", "mlp.down.bias")
GEMMA2_NAMES = names_without(*_MLP_BIASES, **_SANDWICH)
GEMMA3_NAMES = names_without(
    *_MLP_BIASES,
    **_SANDWICH,
    attention__q_norm="self_attn.q_norm.weight",
    attention__k_norm="self_attn.k_norm.weight",
)


def one_plus(canonical: str, array: NDArray[Any]) -> NDArray[Any]:
    """The factor of a norm, 1 + weight; every other tensor as it is."""
    if not canonical.endswith("norm"):
        return array
    factor: NDArray[Any] = as_float32(array) + np.float32(1.0)
    return factor


def _gemma(hf: HfConfig, name: str, pattern: int, caps: tuple[float | None, float | None]) -> Any:
    """What both have in common, without rope: every `pattern`th layer sees everything."""
    hf.only("hidden_activation", "gelu_pytorch_tanh")
    hf.unused("hidden_act")  # of Gemma 1, and still in configs
    hf.only("use_bidirectional_attention", False)
    layers = hf.integer("num_hidden_layers")
    default = [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    return {
        "activation": "gelu_tanh",
        "norm_placement": "sandwich",
        "attention_scale": hf.positive("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": hf.optional_number("attn_logit_softcapping", caps[0]) or 0.0,
        "final_softcap": hf.optional_number("final_logit_softcapping", caps[1]) or 0.0,
        "embedding_scale": math.sqrt(hf.integer("hidden_size")),
        "windows": layer_windows(hf, layers, hf.window("sliding_window", 4096), default),
    }
