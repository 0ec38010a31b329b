#pragma once

// Functions of one number that several kernels share: the same formulas as on the CPU
// (cpu/body_functions.h), fused where they say so and nowhere else.

#include <cstdint>

#include "simt/block.h"

namespace specrt::cuda {

using simt::Bf16;
using simt::from_float;
using simt::Half;
using simt::to_float;

/// Columns of activations are padded with zeros to a multiple of this: a K step of every product.
inline constexpr std::int64_t kPaddedColumns = 64;
constexpr std::int64_t padded_columns(std::int64_t n) {
  return (n + kPaddedColumns - 1) / kPaddedColumns * kPaddedColumns;
}

SPECRT_KERNEL float fused(float a, float b, float c) {
#if SPECRT_ON_DEVICE
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
SPECRT_KERNEL float larger(float a, float b) { return b > a ? b : a; }
SPECRT_KERNEL float infinity() { return simt::float_of(0x7F800000u); }

SPECRT_KERNEL float square_root(float x) {
#if SPECRT_ON_DEVICE
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

/// e^x to about 1 ulp; exactly 0 below the smallest normal, +inf above the largest float.
SPECRT_KERNEL float exponential(float x) {
  if (!(x >= -87.33654f)) return x != x ? x : 0.0f;
  const float clamped = x > 89.0f ? 89.0f : x;
  const float n = fused(clamped, 1.44269504f, 0x1.8p23f) - 0x1.8p23f;
  float r = fused(-n, 0.693359375f, clamped);
  r = fused(-n, -2.12194440e-4f, r);
  float y = 1.9875691500e-4f;
  y = fused(y, r, 1.3981999507e-3f);
  y = fused(y, r, 8.3334519073e-3f);
  y = fused(y, r, 4.1665795894e-2f);
  y = fused(y, r, 1.6666665459e-1f);
  y = fused(y, r, 5.0000001201e-1f);
  y = fused(y, r * r, r) + 1.0f;
  // 2^n in two steps: n = 128 has no float of its own.
  const int whole = static_cast<int>(n);
  const int half = whole / 2;
  const float first = simt::float_of(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = simt::float_of(static_cast<std::uint32_t>(whole - half + 127) << 23);
  return y * first * second;
}

SPECRT_KERNEL float hyperbolic_tangent(float x) {
  return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
}

/// What a gated layer does to its gate.
enum class Activation : std::uint8_t { silu, gelu_tanh };

SPECRT_KERNEL float silu(float x) { return x / (1.0f + exponential(-x)); }

SPECRT_KERNEL float gelu(float x) {
  const float cubic = x * x * x * 0.044715f;
  return x / (1.0f + exponential((x + cubic) * -1.5957691216057308f));
}

SPECRT_KERNEL float activate(Activation activation, float gate, float up) {
  return (activation == Activation::silu ? silu(gate) : gelu(gate)) * up;
}

/// Floats in order, as unsigned integers: -inf lowest, +inf highest, -0 just below 0. No NaN.
SPECRT_KERNEL std::uint32_t order_of(float x) {
  const std::uint32_t bits = simt::bits_of(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
SPECRT_KERNEL float at_order(std::uint32_t order) {
  return simt::float_of((order >> 31) != 0 ? order & 0x7FFFFFFFu : ~order);
}

}  // namespace specrt::cuda
