#pragma once

// 16-bit floats as kernels hold them: bits, converted by round to nearest even. The same bits on
// both sides of the shim.

#include <cstdint>

#include "simt/target.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace specrt::simt {

struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

SPECRT_KERNEL std::uint32_t bits_of(float x) {
#if SPECRT_ON_DEVICE
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(std::uint32_t, x);
#endif
}
SPECRT_KERNEL float float_of(std::uint32_t bits) {
#if SPECRT_ON_DEVICE
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

SPECRT_KERNEL float to_float(float x) { return x; }
SPECRT_KERNEL float to_float(Bf16 x) { return float_of(std::uint32_t{x.bits} << 16); }

SPECRT_KERNEL float to_float(Half x) {
#if SPECRT_ON_DEVICE
  return __half2float(__ushort_as_half(x.bits));
#else
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t rest = x.bits & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  // Its bits moved into place are the number times 2^-112, subnormal ones included.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
#endif
}

template <typename T>
SPECRT_KERNEL T from_float(float x);

template <>
SPECRT_KERNEL float from_float<float>(float x) {
  return x;
}

template <>
SPECRT_KERNEL Bf16 from_float<Bf16>(float x) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {std::uint16_t((bits >> 16) | 0x40u)};
  return {std::uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}

template <>
SPECRT_KERNEL Half from_float<Half>(float x) {
#if SPECRT_ON_DEVICE
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) return {std::uint16_t(sign | 0x7FFFu)};
  if (rest >= 0x477FF000u) return {std::uint16_t(sign | 0x7C00u)};  // 65520 rounds to infinity
  if (rest < 0x38800000u) {
    // Subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    const float shifted = float_of(rest) + 0.5f;
    return {std::uint16_t(sign | (bits_of(shifted) - bits_of(0.5f)))};
  }
  const std::uint32_t rounded = rest + 0xFFFu + (rest >> 13 & 1u) - 0x38000000u;
  return {std::uint16_t(sign | rounded >> 13)};
#endif
}

/// x as `T` holds it.
template <typename T>
SPECRT_KERNEL float rounded(float x) {
  return to_float(from_float<T>(x));
}

/// Two neighbours as one register; the first one low.
template <typename T>
SPECRT_KERNEL std::uint32_t pack2(float low, float high) {
  return from_float<T>(low).bits | std::uint32_t{from_float<T>(high).bits} << 16;
}

}  // namespace specrt::simt
