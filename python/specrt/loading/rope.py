"""Inverse rotary frequencies, rounded to fp32 in the places where torch rounds.

Torch's power with a scalar base is off by one unit in the last place in about one value
in a hundred, and in other places on each instruction set. So the values here equal torch's, save
for a unit or two where torch differs from itself, and never depend on the CPU.

`parameters` are a config's rope parameters, `dim` the rotated dimensions of a head; every function
raises LoadError for a parameter that is missing or out of range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "default_inv_freq",
    "linear_inv_freq",
    "llama3_inv_freq",
    "longrope_inv_freq",
    "yarn_inv_freq",
]


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise LoadError(f"[rope {name}] expected a positive number, got {value!r}")
    return float(value)


def _powers(theta: float, dim: int) -> NDArray[np.float32]:
    """theta^(2i/dim) for i in [0, dim/2). Raises LoadError for dimensions that no head has."""
    if not 2 <= dim <= 65536:
        raise LoadError(f"[rope] expected a head of 2 to 65536 dimensions, got {dim}")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def default_inv_freq(theta: float, dim: int) -> NDArray[np.float32]:
    """theta^(-2i/dim) for i in [0, dim/2)."""
    return np.float32(1.0) / _powers(theta, dim)


def linear_inv_freq(theta: float, dim: int, parameters: Mapping[str, Any]) -> NDArray[np.float32]:
    """Positions divided by `factor`."""
    return default_inv_freq(theta, dim) / np.float32(_positive(parameters, "factor"))


def llama3_inv_freq(
    theta: float, dim: int, parameters: Mapping[str, Any], max_position_embeddings: int
) -> NDArray[np.float32]:
    """Llama 3.1's rule: long wavelengths slowed by `factor`, medium ones blended."""
    factor = _positive(parameters, "factor")
    low = _positive(parameters, "low_freq_factor")
    high = _positive(parameters, "high_freq_factor")
    original = _positive(parameters, "original_max_position_embeddings", max_position_embeddings)
    if not high > low:
        raise LoadError(f"[rope high_freq_factor] expected more than {low}, got {high}")

    one, f32 = np.float32(1.0), np.float32
    inv_freq = default_inv_freq(theta, dim)
    # A scalar divided by a tensor is, in torch, the reciprocal times the scalar: two roundings.
    wavelength = (one / inv_freq) * f32(2 * math.pi)
    slow = wavelength > f32(original / low)
    fast = wavelength < f32(original / high)
    scaled = np.where(slow, inv_freq / f32(factor), inv_freq)
    smooth = ((one / wavelength) * f32(original) - f32(low)) / f32(high - low)
    blended = (one - smooth) * scaled / f32(factor) + smooth * scaled
    result: NDArray[np.float32] = np.where(~fast & ~slow, blended, scaled).astype(np.float32)
    return result


def _attention_factor(parameters: Mapping[str, Any], otherwise: float) -> float:
    """What multiplies cos and sin: the config's own number before the rule's."""
    if "attention_factor" in parameters:
        return _positive(parameters, "attention_factor")
    return otherwise


def yarn_inv_freq(
    theta: float, dim: int, parameters: Mapping[str, Any], max_position_embeddings: int
) -> tuple[NDArray[np.float32], float]:
    """YaRN: slow dimensions divided by `factor`, fast ones left, a ramp between; and the factor
    for cos and sin."""
    original = _positive(parameters, "original_max_position_embeddings", max_position_embeddings)
    ratio = max_position_embeddings / original
    stated = "original_max_position_embeddings" in parameters
    factor = _positive(parameters, "factor", ratio if stated else None)
    fast = _positive(parameters, "beta_fast", 32.0)
    slow = _positive(parameters, "beta_slow", 1.0)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise LoadError(f"[rope truncate] expected true or false, got {truncate!r}")
    if theta == 1.0:
        raise LoadError("[rope rope_theta] expected a base other than 1 for yarn, got 1")

    def dimension(rotations: float) -> float:
        """The dimension that turns so often within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in the original; only the division has to be possible

    one, f32 = np.float32(1.0), np.float32
    powers = _powers(theta, dim)
    ramp = (np.arange((dim + 1) // 2, dtype=np.float32) - f32(low)) / f32(high - low)
    kept = one - np.clip(ramp, f32(0.0), one)
    scaled = (one / (f32(factor) * powers)) * (one - kept) + (one / powers) * kept
    return scaled.astype(np.float32), _attention_factor(parameters, _yarn_scale(factor, parameters))


def _yarn_scale(factor: float, parameters: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    one, other = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not one or not other:  # one of them alone has no effect, and neither has a zero
        return scale(1.0)
    return scale(_positive(parameters, "mscale")) / scale(_positive(parameters, "mscale_all_dim"))


def longrope_inv_freq(
    theta: float,
    dim: int,
    parameters: Mapping[str, Any],
    max_position_embeddings: int,
    length: int,
) -> tuple[NDArray[np.float32], float]:
    """LongRoPE: each frequency divided by its own factor; and the factor for cos and sin.

    `long_factor` serves where `length`, the longest text that will be run, exceeds the original
    context, else `short_factor`: one set for all positions, fixed when the model is loaded.
    """
    original = _positive(parameters, "original_max_position_embeddings", max_position_embeddings)
    ratio = _positive(parameters, "factor", max_position_embeddings / original)
    count = (dim + 1) // 2
    sets = {}
    for name in ("short_factor", "long_factor"):
        values = parameters.get(name)
        if (
            not isinstance(values, list)
            or len(values) != count
            or any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in values)
            or not all(one > 0 for one in values)
        ):
            raise LoadError(f"[rope {name}] expected {count} positive numbers, got {values!r}")
        sets[name] = np.array(values, np.float32)
    factors = sets["long_factor" if length > original else "short_factor"]
    if ratio > 1.0 and not original > 1.0:
        raise LoadError(
            f"[rope original_max_position_embeddings] expected more than 1, got {original}"
        )
    scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1.0 else 1.0
    inv_freq = np.float32(1.0) / (factors * _powers(theta, dim))
    return inv_freq, _attention_factor(parameters, scale)
