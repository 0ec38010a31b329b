"""Rotary embeddings out of a config, in any layout that configs have had."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LoadError
from .hf_config import HfConfig
from .rope import (
    default_inv_freq,
    linear_inv_freq,
    llama3_inv_freq,
    longrope_inv_freq,
    yarn_inv_freq,
)

__all__ = ["KINDS", "Rope", "read_rope", "rope_of"]


@dataclass(frozen=True)
class Rope:
    """One value for each rotated pair of dimensions, and what multiplies cos and sin."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


_ORIGINAL = "original_max_position_embeddings"
# Each kind, and the parameters that it reads.
KINDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset({
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "finetuned",
    }),
    "longrope": frozenset({
        "factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor",
    }),
}  # fmt: skip


def read_rope(
    hf: HfConfig,
    head_dim: int,
    max_positions: int,
    *,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
    kinds: Collection[str] = tuple(KINDS),
    original_positions: int | None = None,
) -> Rope:
    """Rotary factors, from whichever of the three layouts the config uses.

    `rope_scaling` (where not empty) stands before `rope_parameters`, and a theta inside either
    before one at top level, as transformers reads them. `partial` families may rotate a part of
    each head only; `aliases` are other names of kinds; `original_positions` is what the family
    takes for the original context, whatever the rope parameters say.
    """
    places = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = hf.mapping(key)
        if value:
            places[key] = value
    if len(places) == 2 and places["rope_scaling"] != places["rope_parameters"]:
        warnings.warn(
            f"{hf.where}: rope_scaling and rope_parameters differ; rope_scaling is used",
            stacklevel=2,
        )
    parameters = dict(places.get("rope_scaling") or places.get("rope_parameters") or {})
    theta = hf.positive("rope_theta", 10000.0)
    if "rope_theta" in parameters and hf.raw.get("rope_theta") not in (
        None,
        parameters["rope_theta"],
    ):
        warnings.warn(
            f"{hf.where}: rope_theta is {theta:g} at top level and "
            f"{parameters['rope_theta']!r} among the rope parameters; the latter is used",
            stacklevel=2,
        )
    parameters.setdefault("rope_theta", theta)
    if partial:
        parameters.setdefault("partial_rotary_factor", hf.positive("partial_rotary_factor", 1.0))
    # transformers lets a top-level value override the one among the rope parameters.
    hf.unused(_ORIGINAL)
    original = original_positions or hf.raw.get(_ORIGINAL)
    if original is not None:
        parameters[_ORIGINAL] = original
    return rope_of(
        hf, parameters, "rope", head_dim, max_positions,
        partial=partial, aliases=aliases or {}, kinds=kinds, overridden=original is not None,
    )  # fmt: skip


def rope_of(
    hf: HfConfig,
    parameters: Mapping[str, Any],
    label: str,
    head_dim: int,
    max_positions: int,
    *,
    partial: bool = False,
    aliases: Mapping[str, str] | None = None,
    kinds: Collection[str] = tuple(KINDS),
    overridden: bool = False,
) -> Rope:
    """Rotary factors of one set of parameters, theta among them.

    Raises LoadError for a kind that is none of `kinds` and for a parameter that its kind does not
    read. `overridden`: the original context comes from outside, and not every kind reads it.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = (aliases or {}).get(kind, kind) if isinstance(kind, str) else kind
    if kind not in kinds:
        wanted = ", ".join(repr(one) for one in kinds)
        raise LoadError(
            f"[{hf.where} rope_type] expected one of {wanted}, got {kind!r}: "
            "this kind of rope scaling is not supported"
        )
    inner = HfConfig(parameters, f"{hf.where} {label}")
    theta = inner.positive("rope_theta")
    known = KINDS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if overridden:
        known |= {_ORIGINAL}
    if kind == "default" and parameters.get("factor") == 1:
        known |= {"factor"}
    for key in parameters:
        if key not in known:
            raise LoadError(f"[{hf.where} {label}] {key!r} is not supported for type {kind!r}")
    part = inner.positive("partial_rotary_factor", 1.0)
    if part > 1.0 or (part != 1.0 and not partial):
        raise LoadError(f"[{hf.where} {label}] partial_rotary_factor {part:g} is not supported")
    dim = int(head_dim * part)
    if dim < 1:
        raise LoadError(f"[{hf.where} {label}] partial_rotary_factor {part:g} rotates nothing")

    scale = 1.0
    if kind == "default":
        values = default_inv_freq(theta, dim)
    elif kind == "linear":
        values = linear_inv_freq(theta, dim, parameters)
    elif kind == "llama3":
        values = llama3_inv_freq(theta, dim, parameters, max_positions)
    elif kind == "yarn":
        values, scale = yarn_inv_freq(theta, dim, parameters, max_positions)
    else:
        length = max_positions if hf.max_model_len is None else hf.max_model_len
        values, scale = longrope_inv_freq(theta, dim, parameters, max_positions, length)
    return Rope(tuple(float(value) for value in values), scale)
