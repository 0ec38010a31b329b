"""What a model family is, and what most of them share.

A family is a function from config to `ModelFields`, a table from canonical names to the names in
its checkpoints, and the names that its checkpoints may hold without any use. `{i}` is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import LoadError
from .fields import MOST, ModelFields
from .hf_config import HfConfig
from .rope_config import Rope, read_rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FAMILIES",
    "LLAMA_NAMES",
    "Family",
    "decoder",
    "family",
    "layer_windows",
    "names_without",
    "uniform_windows",
]

Reader = Callable[[HfConfig], ModelFields]
Transform = Callable[[str, "NDArray[Any]"], "NDArray[Any]"]


@dataclass(frozen=True)
class Family:
    """One model family.

    Canonical tensors of one layer that share a name in `names` are stored stacked: the rows of the
    first, then those of the next, in the core's order. `transform` gets (canonical name, vector as
    stored) and gives what the core is to hold; matrices, which may be integers, stay as they are.
    """

    architecture: str
    read: Reader
    names: Mapping[str, str]
    ignored: Sequence[str] = ()
    transform: Transform | None = None


FAMILIES: dict[str, Family] = {}


def family(
    model_type: str,
    architecture: str,
    names: Mapping[str, str],
    *,
    ignored: Sequence[str] = (),
    transform: Transform | None = None,
) -> Callable[[Reader], Reader]:
    """Enter a config reader under its model_type and the architecture that generates text."""

    def enter(reader: Reader) -> Reader:
        FAMILIES[model_type] = Family(architecture, reader, names, ignored, transform)
        return reader

    return enter


def decoder(
    hf: HfConfig,
    name: str,
    *,
    positions: int,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    eps: float = 1e-6,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
    activation: Sequence[str] = ("hidden_act", "silu", "swish"),
    rope: Callable[[HfConfig, int, int], Rope] = read_rope,
) -> ModelFields:
    """What all families share: grouped heads, RMS norms, a gated MLP.

    `positions`, `head_dim` (None: hidden_size / heads), `kv_heads` (None: as many as query heads),
    `eps` and `tied` are what a config means that says nothing. `activation` is a key and the
    values it may have; `rope` makes rotary factors of (config, head size, longest context).
    """
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    if heads < 1:
        raise LoadError(f"[{hf.where} num_attention_heads] expected at least 1, got {heads}")
    head_dim = hf.integer("head_dim", hidden // heads if head_dim is None else head_dim)
    max_positions = hf.integer("max_position_embeddings", positions)
    layers = hf.integer("num_hidden_layers")
    # Lists of these lengths are made before the whole is checked.
    for key, value, most in (
        ("head_dim", head_dim, MOST["head_dim"]),
        ("num_hidden_layers", layers, MOST["num_layers"]),
    ):
        if not 1 <= value <= most:
            raise LoadError(f"[{hf.where} {key}] expected 1 to {most}, got {value}")
    if kv_heads is None or hf.is_null("num_key_value_heads"):
        kv_heads = heads
    rotary = rope(hf, head_dim, max_positions)
    hf.only(*activation)
    return ModelFields(
        family=name,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=hf.number("rms_norm_eps", eps),
        rope_inv_freq=rotary.inv_freq,
        rope_scale=rotary.scale,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        tied_embeddings=hf.flag("tie_word_embeddings", tied),
    )


def layer_windows(
    hf: HfConfig, layers: int, window: int | None, default: Sequence[str]
) -> tuple[int, ...]:
    """A window for each layer out of layer_types, () where no layer has one.

    `default` are the types where the config gives none. Raises LoadError for other types, and for
    a sliding layer without a window.
    """
    kinds = hf.layer_types(layers, default)
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise LoadError(
                f"[{hf.where} layer_types] expected 'full_attention' or 'sliding_attention', "
                f"got {kind!r} in layer {layer}: this kind of layer is not supported"
            )
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise LoadError(
            f"[{hf.where} sliding_window] expected a window for 'sliding_attention' in layer "
            f"{kinds.index('sliding_attention')}, got none"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def uniform_windows(fields: ModelFields, window: int | None) -> tuple[int, ...]:
    """The same window in every layer, () for none and for one that no text can outgrow."""
    if window is None or window >= fields.max_position_embeddings:
        return ()
    return (window,) * fields.num_layers


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


def names_without(*endings: str, **others: str) -> dict[str, str]:
    """`LLAMA_NAMES` without the canonical names that end so, and with `others`, in which a key's
    `__` stands for a dot: all of them are names within a layer."""
    names = {one: name for one, name in LLAMA_NAMES.items() if not one.endswith(endings)}
    for key, name in others.items():
        names[f"layers.{{i}}.{key.replace('__', '.')}"] = f"model.layers.{{i}}.{name}"
    return names
