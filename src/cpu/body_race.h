#pragma once

// The exponential race. An id's exponential -log1p(-u) is at least u, so an id whose u is not
// below best * weight cannot win, and the logarithm is computed for a handful of ids only. The
// comparison that decides is always the exact one. Include after a vec_*.h.

#include <math.h>

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

struct RaceState {
  Race best;
  std::int64_t best_id = -1;
  float bound = __builtin_inff();  ///< a little above best.key; infinite when it overflows

  SPECRT_INLINE void enter(std::uint32_t bits, float weight, std::int64_t id) {
    const double u = (bits + 0.5) * 0x1p-32;
    const double key = -::log1p(-u) / static_cast<double>(weight);
    if (best_id >= 0 && !(key < best.key || (key == best.key && id < best_id))) return;
    best.key = key;
    best_id = id;
    const double above = key * (1.0 + 1e-5);
    bound = above > static_cast<double>(__FLT_MAX__)   ? __builtin_inff()
            : above < static_cast<double>(__FLT_MIN__) ? __FLT_MIN__
                                                       : static_cast<float>(above);
  }
};

// No uniform is below 2^-33.
constexpr float kBelowAnyUniform = 0x1p-34f;

/// Ids first .. first + n of a whole number of noise blocks.
SPECRT_INLINE void race_run(RaceState& state, const float* weights, std::int64_t first,
                            std::int64_t n, const NoiseKey& key) {
  F w[4];
  unsigned possible = 0;
  const F bound = set1(state.bound);
  for (int j = 0; j < 4; ++j) {
    const std::int64_t left = n - j * kWidth;
    const float* from = weights + first + j * kWidth;
    w[j] = left >= kWidth ? load(from) : left > 0 ? load_part(from, left) : zero();
    possible |= less_mask(set1(kBelowAnyUniform), mul(bound, w[j]));
  }
  if (possible == 0) return;
  alignas(64) std::uint32_t bits[4 * kWidth];
  philox_bits(static_cast<std::uint32_t>(first / 4), key, bits);
  for (int j = 0; j < 4; ++j) {
    // NaN and values that are not positive compare false.
    unsigned mask = less_mask(unit_lower(bits + j * kWidth), mul(set1(state.bound), w[j]));
    while (mask != 0) {
      const int lane = j * kWidth + __builtin_ctz(mask);
      mask &= mask - 1;
      state.enter(bits[lane], weights[first + lane], first + lane);
    }
  }
}

/// Up to kWidth ids in any order.
SPECRT_INLINE void race_ids(RaceState& state, const float* weights, const std::int32_t* ids,
                            std::int64_t n, const NoiseKey& key) {
  const F w = n == kWidth ? load(weights) : load_part(weights, n);
  const F limit = mul(set1(state.bound), w);
  if (less_mask(set1(kBelowAnyUniform), limit) == 0) return;
  alignas(64) std::int32_t padded[kWidth] = {};
  if (n < kWidth) {
    __builtin_memcpy(padded, ids, static_cast<std::size_t>(n) * sizeof *ids);
    ids = padded;
  }
  alignas(64) std::uint32_t bits[kWidth];
  philox_words(ids, key, bits);
  for (unsigned mask = less_mask(unit_lower(bits), limit); mask != 0; mask &= mask - 1) {
    const int lane = __builtin_ctz(mask);
    state.enter(bits[lane], weights[lane], ids[lane]);
  }
}

Race race(const float* weights, const std::int32_t* ids, std::int64_t n, const NoiseKey& key) {
  RaceState state;
  if (ids == nullptr) {
    for (std::int64_t first = 0; first < n; first += 4 * kWidth) {
      const std::int64_t count = n - first < 4 * kWidth ? n - first : 4 * kWidth;
      race_run(state, weights, first, count, key);
    }
  } else {
    for (std::int64_t first = 0; first < n; first += kWidth) {
      const std::int64_t count = n - first < kWidth ? n - first : kWidth;
      race_ids(state, weights + first, ids + first, count, key);
    }
  }
  state.best.token = state.best_id;
  return state.best;
}

}  // namespace
}  // namespace specrt::cpu
