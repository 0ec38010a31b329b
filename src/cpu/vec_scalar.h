#pragma once

// What any machine can do: four floats through the compiler's generic vectors, which it lowers to
// the baseline instruction set. See vec_avx512.h for what the names mean.

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/pack.h"

#define SPECRT_INLINE inline __attribute__((always_inline))

namespace specrt::cpu {
namespace {

typedef float F __attribute__((vector_size(16)));
typedef std::uint32_t I __attribute__((vector_size(16)));
constexpr int kWidth = 4;

constexpr int kTileRows = 4;
constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : 2; }
constexpr int tile_panels(int) { return 1; }

constexpr int kAccumulators = 8;

SPECRT_INLINE F set1(float x) { return F{x, x, x, x}; }
SPECRT_INLINE F zero() { return set1(0.0f); }
SPECRT_INLINE I bits_of(F x) {
  I u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
SPECRT_INLINE F float_of(I u) {
  F x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}
SPECRT_INLINE F load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
SPECRT_INLINE void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
SPECRT_INLINE F load_part(const float* p, std::int64_t n, float fill = 0.0f) {
  F x = set1(fill);
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
}
SPECRT_INLINE void store_part(float* p, F x, std::int64_t n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

SPECRT_INLINE F add(F a, F b) { return a + b; }
SPECRT_INLINE F sub(F a, F b) { return a - b; }
SPECRT_INLINE F mul(F a, F b) { return a * b; }
SPECRT_INLINE F div(F a, F b) { return a / b; }
SPECRT_INLINE F fma(F a, F b, F c) { return a * b + c; }
SPECRT_INLINE F fnma(F a, F b, F c) { return c - a * b; }
SPECRT_INLINE F max(F a, F b) { return a > b ? a : b; }
SPECRT_INLINE F min(F a, F b) { return a < b ? a : b; }
SPECRT_INLINE F zero_below(F x, F limit, F y) { return x < limit ? zero() : y; }
SPECRT_INLINE unsigned less_mask(F a, F b) {
  unsigned mask = 0;
  for (int i = 0; i < kWidth; ++i) mask |= static_cast<unsigned>(a[i] < b[i]) << i;
  return mask;
}
SPECRT_INLINE unsigned equal_mask(F a, F b) {
  unsigned mask = 0;
  for (int i = 0; i < kWidth; ++i) mask |= static_cast<unsigned>(a[i] == b[i]) << i;
  return mask;
}
SPECRT_INLINE F pick(unsigned mask, F a, F b) {
  F x;
  for (int i = 0; i < kWidth; ++i) x[i] = (mask >> i & 1u) != 0 ? a[i] : b[i];
  return x;
}
SPECRT_INLINE int put_ids(std::int32_t* out, std::int32_t base, unsigned mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) out[count++] = base + __builtin_ctz(mask);
  return count;
}
SPECRT_INLINE F scale_by_power(F y, F n) {
  // Adding 1.5 * 2^23 leaves n + 2^22 in the low mantissa bits: a conversion that is defined for
  // NaN. In two halves, because 2^128 is not a float; 256 keeps the shift non-negative.
  const I biased = (bits_of(n + set1(0x1.8p23f)) & 0x3FFFFFu) + 256u;
  const I whole = biased & 0x3FFu;
  const I half = whole >> 1;
  return y * float_of((half - 128u + 127u) << 23) * float_of((whole - half - 128u + 127u) << 23);
}

SPECRT_INLINE I bf16_bits(F x) {
  const I u = bits_of(x);
  const I rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  const I quiet = u | 0x400000u;
  return (x == x ? rounded : quiet) >> 16;
}
SPECRT_INLINE F round_bf16(F x) { return float_of(bf16_bits(x) << 16); }
SPECRT_INLINE F load_bf16_part(const std::uint16_t* p, std::int64_t n) {
  I u = {};
  for (int i = 0; i < n; ++i) u[i] = p[i];
  return float_of(u << 16);
}
SPECRT_INLINE F load_bf16(const std::uint16_t* p) { return load_bf16_part(p, kWidth); }
SPECRT_INLINE void store_bf16_part(std::uint16_t* p, F x, std::int64_t n) {
  const I u = bf16_bits(x);
  for (int i = 0; i < n; ++i) p[i] = static_cast<std::uint16_t>(u[i]);
}
SPECRT_INLINE void store_bf16(std::uint16_t* p, F x) { store_bf16_part(p, x, kWidth); }

SPECRT_INLINE F load_i8_part(const std::int8_t* p, std::int64_t n) {
  F x = zero();
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(p[i]);
  return x;
}
SPECRT_INLINE F load_i8(const std::int8_t* p) { return load_i8_part(p, kWidth); }
SPECRT_INLINE F load_half(const std::uint16_t* p) {
  return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
SPECRT_INLINE void store_i8_part(std::int8_t* p, F x, std::int64_t n) {
  const F magic = set1(0x1.8p23f);  // adding it rounds to a whole number
  const F whole = (x + magic) - magic;
  for (int i = 0; i < n; ++i) p[i] = static_cast<std::int8_t>(whole[i]);
}
SPECRT_INLINE void store_i8(std::int8_t* p, F x) { store_i8_part(p, x, kWidth); }

struct Dot {
  int at[4][kWidth];  // [k][output]; a sum lies in at[0]
};
constexpr int kDotLines = 1;
SPECRT_INLINE Dot dot_start(std::int32_t) { return {}; }
SPECRT_INLINE Dot dot_weights(const std::int8_t* p) {
  Dot out;
  for (int i = 0; i < 4 * kWidth; ++i) out.at[i % 4][i / 4] = p[i];
  return out;
}
SPECRT_INLINE I dot_row(const char* p) {
  I out;
  for (int i = 0; i < 4; ++i) {
    out[i] = static_cast<std::uint32_t>(static_cast<std::int8_t>(p[i]));
  }
  return out;
}
SPECRT_INLINE Dot dot_add(Dot sums, const Dot& weights, I row) {
  for (int i = 0; i < 4 * kWidth; ++i) {
    sums.at[0][i / 4] += weights.at[i % 4][i / 4] * static_cast<int>(row[i % 4]);
  }
  return sums;
}
SPECRT_INLINE F dot_sum(const Dot& sums) {
  F out;
  for (int i = 0; i < kWidth; ++i) out[i] = static_cast<float>(sums.at[0][i]);
  return out;
}

constexpr int kNibbleRows = 1;
SPECRT_INLINE I low_nibbles(I x) { return x & 0x0F0F0F0Fu; }
SPECRT_INLINE I high_nibbles(I x) { return x >> 4 & 0x0F0F0F0Fu; }
SPECRT_INLINE I four_bytes(const char* p) {
  std::uint32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return I{four, four, four, four};
}
using Nibbles = I;
SPECRT_INLINE Nibbles no_nibbles() { return I{}; }
SPECRT_INLINE Nibbles nibbles_add(Nibbles sums, I weights, I x) {
  for (int byte = 0; byte < 32; byte += 8) {
    for (int i = 0; i < kWidth; ++i) {
      const auto value = static_cast<std::int8_t>(x[i] >> byte & 255u);
      sums[i] += (weights[i] >> byte & 15u) * static_cast<std::uint32_t>(value);
    }
  }
  return sums;
}
SPECRT_INLINE F nibbles_sum(Nibbles high, Nibbles low) {
  F out;
  for (int i = 0; i < kWidth; ++i) {
    out[i] = static_cast<float>(static_cast<std::int32_t>(high[i] * 16u + low[i]));
  }
  return out;
}

SPECRT_INLINE I load_pairs(const void* p) {
  I u;
  __builtin_memcpy(&u, p, sizeof u);
  return u;
}
SPECRT_INLINE F pair_first(I x) { return float_of(x << 16); }
SPECRT_INLINE F pair_second(I x) { return float_of(x & 0xFFFF0000u); }

SPECRT_INLINE float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
SPECRT_INLINE float reduce_max(F x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
SPECRT_INLINE F reduce_four(F a, F b, F c, F d) {
  return F{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)};
}
SPECRT_INLINE F reduce_quads(const F (&q)[1]) { return q[0]; }

SPECRT_INLINE void philox_block(std::uint32_t counter, const NoiseKey& key, std::uint32_t* out) {
  std::uint32_t c0 = counter, c1 = key.position, c2 = key.sample_index, c3 = key.purpose;
  std::uint32_t k0 = static_cast<std::uint32_t>(key.seed);
  std::uint32_t k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(b);
    c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}
SPECRT_INLINE void philox_bits(std::uint32_t first, const NoiseKey& key, std::uint32_t* out) {
  for (std::uint32_t i = 0; i < kWidth; ++i) philox_block(first + i, key, out + 4 * i);
}
SPECRT_INLINE void philox_words(const std::int32_t* ids, const NoiseKey& key, std::uint32_t* out) {
  for (int i = 0; i < kWidth; ++i) {
    const auto id = static_cast<std::uint32_t>(ids[i]);
    std::uint32_t block[4];
    philox_block(id / 4, key, block);
    out[i] = block[id % 4];
  }
}
SPECRT_INLINE F unit_lower(const std::uint32_t* bits) {
  F x;
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<float>(bits[i] >> 1);
  return x * set1(0x1p-31f);
}

}  // namespace
}  // namespace specrt::cpu
