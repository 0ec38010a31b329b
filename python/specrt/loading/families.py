"""The families whose layers look like Llama's, and the way from a config to a family.

Gemma and Phi have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import LoadError
from . import gemma, phi
from .family import (
    FAMILIES,
    LLAMA_NAMES,
    decoder,
    family,
    layer_windows,
    names_without,
    uniform_windows,
)
from .fields import ModelFields
from .hf_config import HfConfig

__all__ = ["FAMILIES", "fields_of"]


def fields_of(
    raw: Mapping[str, Any], where: str = "config.json", *, max_model_len: int | None = None
) -> ModelFields:
    """The fields that a config stands for; `quantization_config` is read elsewhere.

    `max_model_len` decides rope factors that depend on the context (longrope); None is the model's
    own limit. Raises LoadError for an unknown architecture, and for every key that changes the
    arithmetic in a way that is not supported.
    """
    raw = gemma.text_part(raw, where)
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(model_type, (str, type(None))):
        raise LoadError(f"[{where} model_type] expected a name, got {model_type!r}")
    if not isinstance(architectures, list) or not all(isinstance(o, str) for o in architectures):
        raise LoadError(f"[{where} architectures] expected a list of names, got {architectures!r}")
    known = ", ".join(sorted(one.architecture for one in FAMILIES.values()))
    if model_type not in FAMILIES:
        name = architectures[0] if architectures else None
        raise LoadError(
            f"[{where}] unknown architecture {name!r} (model_type {model_type!r}); known: {known}"
        )
    found = FAMILIES[model_type]
    if architectures and found.architecture not in architectures:
        raise LoadError(
            f"[{where} architectures] expected {found.architecture!r}, "
            f"got {architectures[0]!r}; known: {known}"
        )
    config = HfConfig(raw, where, max_model_len)
    # Modules for multi-token prediction are no part of the model; what there is, the tensors tell.
    config.unused("quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers")
    config.only("mtp_use_dedicated_embeddings", False)
    fields = found.read(config)
    config.finish()
    fields.check()
    return fields


# Old checkpoints store the rotary frequencies; the config decides them.
STORED_FREQUENCIES = (
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
)


@family("llama", "LlamaForCausalLM", LLAMA_NAMES, ignored=STORED_FREQUENCIES)
def llama(hf: HfConfig) -> ModelFields:
    """Llama 2, 3 and 3.x, SmolLM2, and what else calls itself so."""
    hf.only("pretraining_tp", 1)
    hf.full_attention_only()
    return decoder(
        hf,
        "llama",
        attention_bias=hf.flag("attention_bias", False),
        mlp_bias=hf.flag("mlp_bias", False),
        positions=2048,
    )


@family("mistral", "MistralForCausalLM", names_without(".bias"), ignored=STORED_FREQUENCIES)
def mistral(hf: HfConfig) -> ModelFields:
    """Mistral 7B, NeMo, Small and Ministral: the same window in all layers, or none."""
    fields = decoder(hf, "mistral", kv_heads=8, positions=131072)
    window = hf.window("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    types = hf.layer_types(fields.num_layers, [kind] * fields.num_layers)
    if any(one != kind for one in types):
        raise LoadError(
            f"[{hf.where} layer_types] expected {kind!r} in every layer, as sliding_window "
            f"{window} says, got {next(one for one in types if one != kind)!r}"
        )
    return replace(fields, windows=uniform_windows(fields, window))


def _qwen_windows(hf: HfConfig, layers: int) -> tuple[int, ...]:
    """A window from max_window_layers on, where use_sliding_window turns it on at all."""
    window = hf.window("sliding_window", 4096)
    full = hf.integer("max_window_layers", 28)
    if not hf.flag("use_sliding_window", False):
        window = None
    sliding = 0 if window is None else max(layers - full, 0)
    default = ["full_attention"] * (layers - sliding) + ["sliding_attention"] * sliding
    return layer_windows(hf, layers, window, default)


@family("qwen2", "Qwen2ForCausalLM", LLAMA_NAMES, ignored=STORED_FREQUENCIES)
def qwen2(hf: HfConfig) -> ModelFields:
    """Qwen2 and 2.5: biases on q, k and v, and a vocabulary padded beyond the tokenizer's."""
    fields = decoder(hf, "qwen2", kv_heads=32, positions=32768)
    return replace(fields, qkv_bias=True, windows=_qwen_windows(hf, fields.num_layers))


@family("mimo", "MiMoForCausalLM", LLAMA_NAMES)
def mimo(hf: HfConfig) -> ModelFields:
    """MiMo 7B: Qwen2's layers, and a multi-token prediction module beside them."""
    bias = hf.flag("attention_bias", True)
    fields = decoder(hf, "mimo", kv_heads=32, positions=32768)
    return replace(fields, qkv_bias=bias, windows=_qwen_windows(hf, fields.num_layers))


QWEN3_NAMES = names_without(
    attention__q_norm="self_attn.q_norm.weight", attention__k_norm="self_attn.k_norm.weight"
)


@family("qwen3", "Qwen3ForCausalLM", QWEN3_NAMES)
def qwen3(hf: HfConfig) -> ModelFields:
    """Qwen3: each head of q and k normed, heads wider than hidden_size / heads."""
    bias = hf.flag("attention_bias", False)
    fields = decoder(hf, "qwen3", positions=32768, head_dim=128, kv_heads=32, attention_bias=bias)
    return replace(fields, qk_norm="head", windows=_qwen_windows(hf, fields.num_layers))


@family("granite", "GraniteForCausalLM", LLAMA_NAMES)
def granite(hf: HfConfig) -> ModelFields:
    """Granite 3's dense models: a factor at every joint."""
    hf.full_attention_only()
    fields = decoder(
        hf,
        "granite",
        attention_bias=hf.flag("attention_bias", False),
        mlp_bias=hf.flag("mlp_bias", False),
        positions=2048,
    )
    return replace(
        fields,
        embedding_scale=hf.positive("embedding_multiplier", 1.0),
        attention_scale=hf.positive("attention_multiplier", 1.0),
        residual_scale=hf.positive("residual_multiplier", 1.0),
        logits_scale=1.0 / hf.positive("logits_scaling", 1.0),
    )


# Norms stand behind the blocks only, and those of q and k reach over all heads.
OLMO2_NAMES = names_without(
    "attention_norm",
    "mlp_norm",
    "mlp.gate.bias",
    "mlp.up.bias",
    "mlp.down.bias",
    attention_post_norm="post_attention_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
    attention__q_norm="self_attn.q_norm.weight",
    attention__k_norm="self_attn.k_norm.weight",
)


@family("olmo2", "Olmo2ForCausalLM", OLMO2_NAMES)
def olmo2(hf: HfConfig) -> ModelFields:
    """OLMo 2."""
    hf.full_attention_only()
    bias = hf.flag("attention_bias", False)
    fields = decoder(hf, "olmo2", eps=1e-5, attention_bias=bias, positions=2048)
    return replace(fields, norm_placement="post", qk_norm="whole")


# Importing them has entered their families.
_ELSEWHERE = (gemma, phi)
