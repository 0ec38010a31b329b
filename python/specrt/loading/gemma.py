"""Gemma 2 and 3: norms on both sides of each block, layers with and without a window.

Their norms multiply by 1 + weight. The sum is taken once, in fp32, when the weight is loaded; the
embedding's factor sqrt(hidden_size) stays in fp32 too, whatever precision the weights have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError
from .family import decoder, family, layer_windows, names_without
from .fields import ModelFields
from .hf_config import HfConfig
from .rope_config import Rope, read_rope, rope_of
from .source import as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["text_part"]

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


def _gemma(
    hf: HfConfig,
    name: str,
    *,
    positions: int,
    pattern: int,
    attention_softcap: float | None,
    final_softcap: float | None,
    rope: Callable[[HfConfig, int, int], Rope],
) -> ModelFields:
    """What both share: every `pattern`th layer sees everything, the others a window."""
    hf.unused("hidden_act")  # Gemma 1's key, still in configs
    hf.only("use_bidirectional_attention", False)
    fields = decoder(
        hf,
        name,
        positions=positions,
        head_dim=256,
        kv_heads=4,
        attention_bias=hf.flag("attention_bias", False),
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        rope=rope,
    )
    default = [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(fields.num_layers)
    ]
    window = hf.window("sliding_window", 4096)
    return replace(
        fields,
        windows=layer_windows(hf, fields.num_layers, window, default),
        activation="gelu_tanh",
        norm_placement="sandwich",
        attention_scale=hf.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=attention_softcap or 0.0,
        final_softcap=hf.optional_number("final_logit_softcapping", final_softcap) or 0.0,
        embedding_scale=math.sqrt(fields.hidden_size),
    )


@family("gemma2", "Gemma2ForCausalLM", GEMMA2_NAMES, transform=one_plus)
def gemma2(hf: HfConfig) -> ModelFields:
    """Gemma 2: soft caps on scores and logits, every other layer with a window."""
    cap = hf.optional_number("attn_logit_softcapping", 50.0)
    return _gemma(
        hf, "gemma2", positions=8192, pattern=2, attention_softcap=cap, final_softcap=30.0,
        rope=read_rope,
    )  # fmt: skip


def _global_rope(hf: HfConfig, head_dim: int, max_positions: int) -> Rope:
    """Layers that see everything: rope_scaling and rope_theta, or their part of rope_parameters."""
    parameters = _nested(hf, "full_attention")
    scaling = hf.mapping("rope_scaling")
    theta = hf.positive("rope_theta", 1e6)
    return rope_of(
        hf, {"rope_theta": theta, **parameters, **scaling}, "rope", head_dim, max_positions
    )


def _local_rope(hf: HfConfig, head_dim: int, max_positions: int) -> Rope:
    """Layers with a window: rope_local_base_freq, or their part of rope_parameters."""
    parameters = _nested(hf, "sliding_attention")
    theta = hf.positive("rope_local_base_freq", 1e4)
    rope = rope_of(hf, {"rope_theta": theta, **parameters}, "local rope", head_dim, max_positions)
    if rope.scale != 1.0:
        raise LoadError(
            f"[{hf.where} rope_parameters] expected an attention factor of 1 in "
            f"'sliding_attention', got {rope.scale}"
        )
    return rope


def _nested(hf: HfConfig, kind: str) -> dict[str, Any]:
    parameters = hf.mapping("rope_parameters")
    for key, value in parameters.items():
        if key not in ("full_attention", "sliding_attention") or not isinstance(value, dict):
            raise LoadError(
                f"[{hf.where} rope_parameters] expected objects for 'full_attention' and "
                f"'sliding_attention', got {key!r}: {value!r}"
            )
    return {name: one for name, one in parameters.get(kind, {}).items() if one is not None}


@family("gemma3_text", "Gemma3ForCausalLM", GEMMA3_NAMES, transform=one_plus)
def gemma3(hf: HfConfig) -> ModelFields:
    """Gemma 3's text model: q and k normed, other rotary factors in layers with a window."""
    hf.only("attn_logit_softcapping", None)  # the key exists, but transformers does not heed it
    pattern = hf.integer("sliding_window_pattern", 6)
    fields = _gemma(
        hf, "gemma3_text", positions=131072, pattern=pattern, attention_softcap=None,
        final_softcap=None, rope=_global_rope,
    )  # fmt: skip
    local = _local_rope(hf, fields.head_dim, fields.max_position_embeddings)
    return replace(fields, qk_norm="head", rope_local_inv_freq=local.inv_freq)


def text_part(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The text model's config out of a composite config; any other config as it is.

    Raises LoadError for a Gemma 3 with a vision tower: its text model alone is not the checkpoint.
    """
    if raw.get("model_type") != "gemma3":
        return raw
    text, architectures = raw.get("text_config"), raw.get("architectures") or []
    if architectures != ["Gemma3ForCausalLM"] or not isinstance(text, dict):
        raise LoadError(
            f"[{where} model_type] 'gemma3' with architectures {architectures!r} holds a vision "
            "model: expected a text-only checkpoint, 'gemma3_text' or Gemma3ForCausalLM"
        )
    # What stands outside are token ids and ties, which the text model has defaults for.
    outer = {key: raw[key] for key in ("quantization_config", "eos_token_id") if key in raw}
    return {**text, **outer, "model_type": "gemma3_text", "architectures": architectures}
