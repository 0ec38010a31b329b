#pragma once

// Eight floats at a time; see vec_avx512.h for what the names mean.

#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels.h"

#define SPECRT_INLINE inline __attribute__((always_inline))

namespace specrt::cpu {
namespace {

using F = __m256;
using I = __m256i;
constexpr int kWidth = 8;

constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows <= 3 ? 4 : 2; }
constexpr int tile_panels(int rows) { return rows == 1 ? 2 : 1; }

constexpr int kAccumulators = 8;

SPECRT_INLINE I first_lanes(std::int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

SPECRT_INLINE F zero() { return _mm256_setzero_ps(); }
SPECRT_INLINE F set1(float x) { return _mm256_set1_ps(x); }
SPECRT_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
SPECRT_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
SPECRT_INLINE F load_part(const float* p, std::int64_t n, float fill = 0.0f) {
  const I mask = first_lanes(n);
  return _mm256_blendv_ps(set1(fill), _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
SPECRT_INLINE void store_part(float* p, F x, std::int64_t n) {
  _mm256_maskstore_ps(p, first_lanes(n), x);
}

SPECRT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
SPECRT_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
SPECRT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
SPECRT_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
SPECRT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
SPECRT_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
SPECRT_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
SPECRT_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
SPECRT_INLINE F zero_below(F x, F limit, F y) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y);
}
SPECRT_INLINE unsigned less_mask(F a, F b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
SPECRT_INLINE unsigned equal_mask(F a, F b) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
SPECRT_INLINE F pick(unsigned mask, F a, F b) {
  const I lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const I bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), lanes);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, lanes)));
}
SPECRT_INLINE int put_ids(std::int32_t* out, std::int32_t base, unsigned mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) out[count++] = base + __builtin_ctz(mask);
  return count;
}
SPECRT_INLINE F power_of_two(I n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
SPECRT_INLINE F scale_by_power(F y, F n) {
  // In two halves, because 2^128 is not a float.
  const I whole = _mm256_cvtps_epi32(n);
  const I half = _mm256_srai_epi32(whole, 1);
  return mul(mul(y, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

SPECRT_INLINE I bf16_bits(F x) {
  const I u = _mm256_castps_si256(x);
  const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const I rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const I quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
SPECRT_INLINE F round_bf16(F x) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16)); }
SPECRT_INLINE F widen(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
SPECRT_INLINE F load_bf16(const std::uint16_t* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SPECRT_INLINE F load_bf16_part(const std::uint16_t* p, std::int64_t n) {
  alignas(16) std::uint16_t lanes[8] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(n) * 2);
  return load_bf16(lanes);
}
SPECRT_INLINE void store_bf16(std::uint16_t* p, F x) {
  const I bits = bf16_bits(x);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
SPECRT_INLINE void store_bf16_part(std::uint16_t* p, F x, std::int64_t n) {
  alignas(16) std::uint16_t lanes[8];
  store_bf16(lanes, x);
  __builtin_memcpy(p, lanes, static_cast<std::size_t>(n) * 2);
}

SPECRT_INLINE F load_i8(const std::int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
SPECRT_INLINE F load_i8_part(const std::int8_t* p, std::int64_t n) {
  alignas(8) std::int8_t lanes[8] = {};
  __builtin_memcpy(lanes, p, static_cast<std::size_t>(n));
  return load_i8(lanes);
}
SPECRT_INLINE F load_half(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SPECRT_INLINE void store_i8(std::int8_t* p, F x) {
  const I whole = _mm256_cvtps_epi32(x);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
SPECRT_INLINE void store_i8_part(std::int8_t* p, F x, std::int64_t n) {
  alignas(8) std::int8_t lanes[8];
  store_i8(lanes, x);
  __builtin_memcpy(p, lanes, static_cast<std::size_t>(n));
}

struct Dot {
  I low, high;
};
constexpr int kDotLines = 2;
SPECRT_INLINE Dot dot_start(std::int32_t) {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
SPECRT_INLINE Dot dot_weights(const std::int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
SPECRT_INLINE I dot_row(const char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
}
SPECRT_INLINE Dot dot_add(Dot sums, Dot weights, I row) {
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(weights.low, row)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(weights.high, row))};
}
SPECRT_INLINE F dot_sum(Dot sums) {
  const I pairs = _mm256_hadd_epi32(sums.low, sums.high);
  return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0xD8));
}

constexpr int kNibbleRows = 2;
SPECRT_INLINE I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
SPECRT_INLINE I high_nibbles(I x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
SPECRT_INLINE I four_bytes(const char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
using Nibbles = I;  // of 16 bits: eight fours of products, no more than 8 * 2 * 15 * 128
SPECRT_INLINE Nibbles no_nibbles() { return _mm256_setzero_si256(); }
SPECRT_INLINE Nibbles nibbles_add(Nibbles sums, I weights, I x) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x));
}
SPECRT_INLINE F nibbles_sum(Nibbles high, Nibbles low) {
  const I ones = _mm256_set1_epi16(1);
  const I a = _mm256_slli_epi32(_mm256_madd_epi16(high, ones), 4);
  return _mm256_cvtepi32_ps(_mm256_add_epi32(a, _mm256_madd_epi16(low, ones)));
}

SPECRT_INLINE I load_pairs(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
SPECRT_INLINE F pair_first(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
SPECRT_INLINE F pair_second(I x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

SPECRT_INLINE float reduce_add(F x) {
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
SPECRT_INLINE float reduce_max(F x) {
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

SPECRT_INLINE F reduce_four(F a, F b, F c, F d) {
  const F ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const F cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
             _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
SPECRT_INLINE F reduce_quads(const F (&q)[2]) {
  return add(_mm256_permute2f128_ps(q[0], q[1], 0x20), _mm256_permute2f128_ps(q[0], q[1], 0x31));
}

SPECRT_INLINE void multiply_wide(I a, I m, I& high, I& low) {
  const I even = _mm256_mul_epu32(a, m);
  const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
SPECRT_INLINE void philox_blocks(const NoiseKey& key, I& c0, I& c1, I& c2, I& c3) {
  c1 = _mm256_set1_epi32(static_cast<int>(key.position));
  c2 = _mm256_set1_epi32(static_cast<int>(key.sample_index));
  c3 = _mm256_set1_epi32(static_cast<int>(key.purpose));
  I k0 = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key.seed)));
  I k1 = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key.seed >> 32)));
  const I m0 = _mm256_set1_epi32(static_cast<int>(0xD2511F53u));
  const I m1 = _mm256_set1_epi32(static_cast<int>(0xCD9E8D57u));
  for (int round = 0; round < 10; ++round) {
    I high0, low0, high1, low1;
    multiply_wide(c0, m0, high0, low0);
    multiply_wide(c2, m1, high1, low1);
    c0 = _mm256_xor_si256(high1, _mm256_xor_si256(c1, k0));
    c1 = low1;
    c2 = _mm256_xor_si256(high0, _mm256_xor_si256(c3, k1));
    c3 = low0;
    k0 = _mm256_add_epi32(k0, _mm256_set1_epi32(static_cast<int>(0x9E3779B9u)));
    k1 = _mm256_add_epi32(k1, _mm256_set1_epi32(static_cast<int>(0xBB67AE85u)));
  }
}
SPECRT_INLINE void philox_bits(std::uint32_t first, const NoiseKey& key, std::uint32_t* out) {
  // Blocks in an order that makes the final interleave put ids beside each other.
  I c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)),
                          _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  I c1, c2, c3;
  philox_blocks(key, c0, c1, c2, c3);
  const I a = _mm256_unpacklo_epi32(c0, c1), b = _mm256_unpackhi_epi32(c0, c1);
  const I c = _mm256_unpacklo_epi32(c2, c3), d = _mm256_unpackhi_epi32(c2, c3);
  I* to = reinterpret_cast<I*>(out);
  _mm256_storeu_si256(to, _mm256_unpacklo_epi64(a, c));
  _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(a, c));
  _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi64(b, d));
  _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi64(b, d));
}
SPECRT_INLINE void philox_words(const std::int32_t* ids, const NoiseKey& key, std::uint32_t* out) {
  const I id = _mm256_loadu_si256(reinterpret_cast<const I*>(ids));
  I c0 = _mm256_srli_epi32(id, 2);
  I c1, c2, c3;
  philox_blocks(key, c0, c1, c2, c3);
  // A blend goes by the sign of a lane: the lowest bit of id, then the next.
  const auto by_bit = [&](I a, I b, int bit) {
    return _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b),
                         _mm256_castsi256_ps(_mm256_slli_epi32(id, 31 - bit))));
  };
  _mm256_storeu_si256(reinterpret_cast<I*>(out), by_bit(by_bit(c0, c1, 0), by_bit(c2, c3, 0), 1));
}
SPECRT_INLINE F unit_lower(const std::uint32_t* bits) {
  const I half = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits)), 1);
  return mul(_mm256_cvtepi32_ps(half), set1(0x1p-31f));
}

}  // namespace
}  // namespace specrt::cpu
