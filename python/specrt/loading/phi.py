"""Phi 3, 3.5, 4 and 4-mini: fused projections, a part of each head rotated, longrope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from .family import decoder, family, names_without, uniform_windows
from .fields import ModelFields
from .hf_config import HfConfig
from .rope_config import read_rope

# q over k over v in one matrix, gate over up in another.
PHI3_NAMES = names_without(
    ".bias",
    attention__q="self_attn.qkv_proj.weight",
    attention__k="self_attn.qkv_proj.weight",
    attention__v="self_attn.qkv_proj.weight",
    mlp__gate="mlp.gate_up_proj.weight",
    mlp__up="mlp.gate_up_proj.weight",
)
# Names that longrope has had; transformers reads a Phi's "yarn" so too.
_OLD_NAMES: Mapping[str, str] = {"su": "longrope", "yarn": "longrope"}


@family("phi3", "Phi3ForCausalLM", PHI3_NAMES)
def phi3(hf: HfConfig) -> ModelFields:
    """All of them call themselves phi3."""
    hf.full_attention_only()
    hf.only("full_attn_mod", 1)
    hf.only("interpolate_factor", 1)
    rope = partial(
        read_rope,
        partial=True,
        aliases=_OLD_NAMES,
        kinds=("default", "longrope"),
        original_positions=hf.integer("original_max_position_embeddings", 4096),
    )
    fields = decoder(hf, "phi3", eps=1e-5, positions=4096, rope=rope)
    return replace(fields, windows=uniform_windows(fields, hf.window("sliding_window", None)))
