#pragma once

// Sixteen floats at a time. The names below are the whole vocabulary of the kernel bodies;
// vec_avx2.h and vec_scalar.h say the same. All names are local to the unit that includes them.

// gcc 12 takes the "undefined" operands of its own intrinsics for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#include "cpu/kernels.h"

#define SPECRT_INLINE inline __attribute__((always_inline))

namespace specrt::cpu {
namespace {

using F = __m512;
using I = __m512i;
constexpr int kWidth = 16;

// GEMM tile shapes: most rows of a tile, vectors of a panel it holds, panels side by side.
constexpr int kTileRows = 12;
constexpr int tile_vectors(int) { return 2; }
constexpr int tile_panels(int rows) { return rows <= 5 ? 2 : 1; }

// Accumulators that a loop may hold beside its operands.
constexpr int kAccumulators = 16;

SPECRT_INLINE __mmask16 first_lanes(std::int64_t n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}

SPECRT_INLINE F zero() { return _mm512_setzero_ps(); }
SPECRT_INLINE F set1(float x) { return _mm512_set1_ps(x); }
SPECRT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
SPECRT_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
/// The first n lanes from memory, the rest `fill`.
SPECRT_INLINE F load_part(const float* p, std::int64_t n, float fill = 0.0f) {
  return _mm512_mask_loadu_ps(set1(fill), first_lanes(n), p);
}
SPECRT_INLINE void store_part(float* p, F x, std::int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}

SPECRT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
SPECRT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
SPECRT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
SPECRT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
/// a * b + c
SPECRT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
/// c - a * b
SPECRT_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
/// b where either is NaN.
SPECRT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
SPECRT_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
/// x < limit ? 0 : y
SPECRT_INLINE F zero_below(F x, F limit, F y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
/// Bit i set where a[i] < b[i].
SPECRT_INLINE unsigned less_mask(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
SPECRT_INLINE unsigned equal_mask(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
/// Lane i is bit i of mask ? a[i] : b[i].
SPECRT_INLINE F pick(unsigned mask, F a, F b) {
  return _mm512_mask_mov_ps(b, static_cast<__mmask16>(mask), a);
}
/// Writes base + i for every bit i of a mask of kWidth bits, ascending, and returns how many.
SPECRT_INLINE int put_ids(std::int32_t* out, std::int32_t base, unsigned mask) {
  const I ids =
      _mm512_add_epi32(_mm512_set1_epi32(base),
                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const int count = __builtin_popcount(mask);
  _mm512_mask_storeu_epi32(out, first_lanes(count),
                           _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), ids));
  return count;
}
/// y * 2^n for whole n in [-126, 128].
SPECRT_INLINE F scale_by_power(F y, F n) { return _mm512_scalef_ps(y, n); }

/// bf16 bits in the low halves of 32-bit lanes, rounded to nearest even, NaN kept.
SPECRT_INLINE I bf16_bits(F x) {
  const I u = _mm512_castps_si512(x);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const I quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
}
SPECRT_INLINE F round_bf16(F x) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(x), 16)); }
SPECRT_INLINE F widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
SPECRT_INLINE F load_bf16(const std::uint16_t* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SPECRT_INLINE F load_bf16_part(const std::uint16_t* p, std::int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
SPECRT_INLINE void store_bf16(std::uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(x)));
}
SPECRT_INLINE void store_bf16_part(std::uint16_t* p, F x, std::int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtepi32_epi16(bf16_bits(x)));
}

SPECRT_INLINE F load_i8(const std::int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
SPECRT_INLINE F load_i8_part(const std::int8_t* p, std::int64_t n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}
/// fp16 to float.
SPECRT_INLINE F load_half(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
/// To the nearest whole numbers, ties to even; |x| <= 127.
SPECRT_INLINE void store_i8(std::int8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

SPECRT_INLINE void store_i8_part(std::int8_t* p, F x, std::int64_t n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

/// Sums of products of int8 in fours, for kWidth outputs; how they lie is the level's own affair.
/// `kDotLines` lines of x are summed at once; dot_start is told what a line's values sum up to.
#if defined(__AVX512VNNI__)
constexpr int kDotLines = 8;
struct Dot {
  I sum;
};
// The instruction multiplies unsigned by signed numbers: weights are taken as q + 128, and 128
// times the line's sum is taken off at the start. What wraps round on the way comes back.
SPECRT_INLINE Dot dot_start(std::int32_t sum) {
  return {_mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(sum) * 0xFFFFFF80u))};
}
SPECRT_INLINE Dot dot_weights(const std::int8_t* p) {
  return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))};
}
SPECRT_INLINE I dot_row(const char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
SPECRT_INLINE Dot dot_add(Dot sums, Dot weights, I row) {
  return {_mm512_dpbusd_epi32(sums.sum, weights.sum, row)};
}
SPECRT_INLINE F dot_sum(Dot sums) { return _mm512_cvtepi32_ps(sums.sum); }
#else
constexpr int kDotLines = 4;
struct Dot {
  I low, high;
};
SPECRT_INLINE Dot dot_start(std::int32_t) {
  return {_mm512_setzero_si512(), _mm512_setzero_si512()};
}
/// kWidth outputs' weights of four k.
SPECRT_INLINE Dot dot_weights(const std::int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)))};
}
/// A row's four values.
SPECRT_INLINE I dot_row(const char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
}
SPECRT_INLINE Dot dot_add(Dot sums, Dot weights, I row) {
  return {_mm512_add_epi32(sums.low, _mm512_madd_epi16(weights.low, row)),
          _mm512_add_epi32(sums.high, _mm512_madd_epi16(weights.high, row))};
}
/// In output order, as floats.
SPECRT_INLINE F dot_sum(Dot sums) {
  const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const I odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_permutex2var_epi32(sums.low, even, sums.high),
                                             _mm512_permutex2var_epi32(sums.low, odd, sums.high)));
}
#endif

/// The low and the high halves of bytes, and four bytes in every lane.
constexpr int kNibbleRows = 4;
SPECRT_INLINE I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
SPECRT_INLINE I high_nibbles(I x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
SPECRT_INLINE I four_bytes(const char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
/// Sums of eight times four products of nibbles with int8, for kWidth outputs, and 16 of the first
/// and one of the second as a float.
using Nibbles = I;
SPECRT_INLINE Nibbles no_nibbles() { return _mm512_setzero_si512(); }
#if defined(__AVX512VNNI__)
SPECRT_INLINE Nibbles nibbles_add(Nibbles sums, I weights, I x) {
  return _mm512_dpbusd_epi32(sums, weights, x);
}
SPECRT_INLINE F nibbles_sum(Nibbles high, Nibbles low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 4), low));
}
#else
// In 16 bits: no more than 8 * 2 * 15 * 128.
SPECRT_INLINE Nibbles nibbles_add(Nibbles sums, I weights, I x) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, x));
}
SPECRT_INLINE F nibbles_sum(Nibbles high, Nibbles low) {
  const I ones = _mm512_set1_epi16(1);
  const I a = _mm512_slli_epi32(_mm512_madd_epi16(high, ones), 4);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(a, _mm512_madd_epi16(low, ones)));
}
#endif

/// Pairs of bf16, one pair per lane, and their halves as floats.
SPECRT_INLINE I load_pairs(const void* p) { return _mm512_loadu_si512(p); }
SPECRT_INLINE F pair_first(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
SPECRT_INLINE F pair_second(I x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

SPECRT_INLINE float reduce_add(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
SPECRT_INLINE float reduce_max(F x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

/// In each 128-bit lane, element i is the sum over that lane of the i-th argument.
SPECRT_INLINE F reduce_four(F a, F b, F c, F d) {
  const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
/// From the reduce_four of each four of kWidth vectors, the vector of their sums.
SPECRT_INLINE F reduce_quads(const F (&q)[4]) {
  const F ab = add(_mm512_shuffle_f32x4(q[0], q[1], 0x88), _mm512_shuffle_f32x4(q[0], q[1], 0xDD));
  const F cd = add(_mm512_shuffle_f32x4(q[2], q[3], 0x88), _mm512_shuffle_f32x4(q[2], q[3], 0xDD));
  return add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

SPECRT_INLINE void multiply_wide(I a, I m, I& high, I& low) {
  const I even = _mm512_mul_epu32(a, m);
  const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
  low = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
}
/// The blocks with counters c0: their four words.
SPECRT_INLINE void philox_blocks(const NoiseKey& key, I& c0, I& c1, I& c2, I& c3) {
  c1 = _mm512_set1_epi32(static_cast<int>(key.position));
  c2 = _mm512_set1_epi32(static_cast<int>(key.sample_index));
  c3 = _mm512_set1_epi32(static_cast<int>(key.purpose));
  I k0 = _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key.seed)));
  I k1 = _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key.seed >> 32)));
  const I m0 = _mm512_set1_epi32(static_cast<int>(0xD2511F53u));
  const I m1 = _mm512_set1_epi32(static_cast<int>(0xCD9E8D57u));
  for (int round = 0; round < 10; ++round) {
    I high0, low0, high1, low1;
    multiply_wide(c0, m0, high0, low0);
    multiply_wide(c2, m1, high1, low1);
    c0 = _mm512_ternarylogic_epi32(high1, c1, k0, 0x96);
    c1 = low1;
    c2 = _mm512_ternarylogic_epi32(high0, c3, k1, 0x96);
    c3 = low0;
    k0 = _mm512_add_epi32(k0, _mm512_set1_epi32(static_cast<int>(0x9E3779B9u)));
    k1 = _mm512_add_epi32(k1, _mm512_set1_epi32(static_cast<int>(0xBB67AE85u)));
  }
}
/// The noise bits of 4 * kWidth consecutive ids, from id 4 * first on.
SPECRT_INLINE void philox_bits(std::uint32_t first, const NoiseKey& key, std::uint32_t* out) {
  // Blocks in an order that makes the final interleave put ids beside each other.
  I c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                          _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  I c1, c2, c3;
  philox_blocks(key, c0, c1, c2, c3);
  const I a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
  const I c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(a, c));
  _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(a, c));
  _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi64(b, d));
  _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi64(b, d));
}
/// The noise bits of kWidth ids.
SPECRT_INLINE void philox_words(const std::int32_t* ids, const NoiseKey& key, std::uint32_t* out) {
  const I id = _mm512_loadu_si512(ids);
  I c0 = _mm512_srli_epi32(id, 2);
  I c1, c2, c3;
  philox_blocks(key, c0, c1, c2, c3);
  const __mmask16 odd = _mm512_test_epi32_mask(id, _mm512_set1_epi32(1));
  const __mmask16 upper = _mm512_test_epi32_mask(id, _mm512_set1_epi32(2));
  const I low = _mm512_mask_mov_epi32(c0, odd, c1);
  const I high = _mm512_mask_mov_epi32(c2, odd, c3);
  _mm512_storeu_si512(out, _mm512_mask_mov_epi32(low, upper, high));
}
/// About bits / 2^32 and never above it by more than float rounding.
SPECRT_INLINE F unit_lower(const std::uint32_t* bits) {
  const I half = _mm512_srli_epi32(_mm512_loadu_si512(bits), 1);
  return mul(_mm512_cvtepi32_ps(half), set1(0x1p-31f));
}

}  // namespace
}  // namespace specrt::cpu
