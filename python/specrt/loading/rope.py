"""Rotary frequencies as fp32 values, computed the same on every machine.

The operations and their fp32 roundings are those of transformers. One differs by design: the power
is correctly rounded, whereas torch's own is off by one unit in the last place in about one value
in a hundred, and in other places on each instruction set. So the values here equal torch's, save
for a unit or two where torch differs from itself, and never depend on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LoadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["default_inv_freq", "llama3_inv_freq"]


def default_inv_freq(theta: float, dim: int) -> NDArray[np.float32]:
    """theta^(-2i/dim) for i in [0, dim/2)."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    power = np.power(np.float64(np.float32(theta)), exponents.astype(np.float64))
    return np.float32(1.0) / power.astype(np.float32)


def llama3_inv_freq(
    theta: float, dim: int, parameters: Mapping[str, Any], max_position_embeddings: int
) -> NDArray[np.float32]:
    """Llama 3.1's rule: long wavelengths slowed by `factor`, medium ones blended.

    Raises LoadError for a parameter that is missing or out of range.
    """

    def positive(name: str, default: float | None = None) -> float:
        value = parameters.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise LoadError(f"[rope {name}] expected a positive number, got {value!r}")
        return float(value)

    factor = positive("factor")
    low, high = positive("low_freq_factor"), positive("high_freq_factor")
    original = positive("original_max_position_embeddings", max_position_embeddings)
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
