#pragma once

// Functions of one vector that several kernels share. Include after a vec_*.h.

namespace specrt::cpu {
namespace {

/// Calls body(i, lanes) over [0, n) in steps of a vector, lanes == kWidth but for the tail.
template <typename Body>
SPECRT_INLINE void for_vectors(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, static_cast<std::int64_t>(kWidth));
  if (i < n) body(i, n - i);
}

SPECRT_INLINE F load_lanes(const float* p, std::int64_t lanes) {
  return lanes == kWidth ? load(p) : load_part(p, lanes);
}
SPECRT_INLINE void store_lanes(float* p, F x, std::int64_t lanes) {
  if (lanes == kWidth) {
    store(p, x);
  } else {
    store_part(p, x, lanes);
  }
}

/// e^x to about 1 ulp; exactly 0 below the smallest normal, +inf above the largest float.
SPECRT_INLINE F exponential(F x) {
  const F lowest = set1(-87.33654f);
  const F magic = set1(0x1.8p23f);  // adding it rounds to a whole number
  const F clamped = min(set1(89.0f), max(lowest, x));
  const F n = sub(fma(clamped, set1(1.44269504f), magic), magic);
  // ln 2 in two parts, the first short enough for n times it to be exact.
  F r = fnma(n, set1(0.693359375f), clamped);
  r = fnma(n, set1(-2.12194440e-4f), r);
  F y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(y, mul(r, r), r), set1(1.0f));
  return zero_below(x, lowest, scale_by_power(y, n));
}

/// tanh(x) = 1 - 2 / (exp(2x) + 1): exact at the ends, within a rounding of 1 near zero.
SPECRT_INLINE F hyperbolic_tangent(F x) {
  const F one = set1(1.0f);
  return sub(one, div(set1(2.0f), add(exponential(add(x, x)), one)));
}

SPECRT_INLINE F silu(F x) { return div(x, add(set1(1.0f), exponential(sub(zero(), x)))); }

/// gelu's tanh form: x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)) with
/// u = sqrt(2 / pi) * (x + 0.044715 x^3).
SPECRT_INLINE F gelu(F x) {
  const F cubic = mul(mul(mul(x, x), x), set1(0.044715f));
  const F minus_two_u = mul(add(x, cubic), set1(-1.5957691216057308f));
  return div(x, add(set1(1.0f), exponential(minus_two_u)));
}

}  // namespace
}  // namespace specrt::cpu
