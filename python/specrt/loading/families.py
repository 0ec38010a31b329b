"""The model families: what each makes of a config, and what it calls its tensors.

A family is a function from config to `ModelFields`, a table from canonical names to the names in
its checkpoints, and the names that its checkpoints may hold without any use. `{i}` is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import LoadError
from .fields import ModelFields
from .hf_config import HfConfig

__all__ = ["FAMILIES", "IGNORED", "NAMES", "family", "fields_of"]

Reader = Callable[[HfConfig], ModelFields]

FAMILIES: dict[str, Reader] = {}
ARCHITECTURES: dict[str, str] = {}
NAMES: dict[str, dict[str, str]] = {}
IGNORED: dict[str, tuple[str, ...]] = {}


def family(model_type: str, architecture: str) -> Callable[[Reader], Reader]:
    """Enter a config reader under its model_type and the architecture that generates text."""

    def enter(reader: Reader) -> Reader:
        FAMILIES[model_type] = reader
        ARCHITECTURES[model_type] = architecture
        return reader

    return enter


def fields_of(raw: Mapping[str, Any], where: str = "config.json") -> ModelFields:
    """The fields that a config stands for.

    Raises LoadError for an unknown architecture, and for every key that changes the arithmetic in
    a way that is not supported.
    """
    if raw.get("quantization_config"):
        quantization = raw["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise LoadError(
            f"[{where} quantization_config] expected unquantised weights, "
            f"got quant_method {method!r}: quantised checkpoints are not supported"
        )
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    known = ", ".join(sorted(ARCHITECTURES.values()))
    if model_type not in FAMILIES:
        name = architectures[0] if architectures else None
        raise LoadError(
            f"[{where}] unknown architecture {name!r} (model_type {model_type!r}); known: {known}"
        )
    if architectures and ARCHITECTURES[model_type] not in architectures:
        raise LoadError(
            f"[{where} architectures] expected {ARCHITECTURES[model_type]!r}, "
            f"got {architectures[0]!r}; known: {known}"
        )
    config = HfConfig(raw, where)
    fields = FAMILIES[model_type](config)
    config.finish()
    fields.check()
    return fields


def _llama_like(
    hf: HfConfig, name: str, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, positions: int
) -> ModelFields:
    """What Llama and its near relations share: grouped heads, RMS norms, a SiLU-gated MLP."""
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    if heads < 1:
        raise LoadError(f"[{hf.where} num_attention_heads] expected at least 1, got {heads}")
    head_dim = hf.integer("head_dim", hidden // heads)
    max_positions = hf.integer("max_position_embeddings", positions)
    hf.only("hidden_act", "silu", "swish")
    hf.only("pretraining_tp", 1)
    hf.full_attention_only()
    return ModelFields(
        family=name,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=hf.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=hf.number("rms_norm_eps", 1e-6),
        rope_inv_freq=hf.rope(head_dim, max_positions),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


LLAMA_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.attention.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attention.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers.{i}.attention.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers.{i}.attention.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers.{i}.attention.o.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.gate.bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers.{i}.mlp.up.bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers.{i}.mlp.down.bias": "model.layers.{i}.mlp.down_proj.bias",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

# Old checkpoints store the rotary frequencies; the config decides them.
LLAMA_IGNORED = (
    "model.layers.{i}.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
)


@family("llama", "LlamaForCausalLM")
def llama(hf: HfConfig) -> ModelFields:
    """Llama 2, 3 and 3.x, SmolLM2, and what else calls itself so."""
    attention_bias = hf.flag("attention_bias", False)
    return _llama_like(
        hf,
        "llama",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=hf.flag("mlp_bias", False),
        positions=2048,
    )


NAMES["llama"] = LLAMA_NAMES
IGNORED["llama"] = LLAMA_IGNORED


@family("qwen2", "Qwen2ForCausalLM")
def qwen2(hf: HfConfig) -> ModelFields:
    """Qwen2 and 2.5: biases on q, k and v, and a vocabulary padded beyond the tokenizer's."""
    hf.only("use_sliding_window", False)
    hf.unused("sliding_window", "max_window_layers")  # no effect without use_sliding_window
    return _llama_like(
        hf, "qwen2", qkv_bias=True, output_bias=False, mlp_bias=False, positions=32768
    )


NAMES["qwen2"] = LLAMA_NAMES
IGNORED["qwen2"] = LLAMA_IGNORED
