#pragma once

// int8 and int4 weights as the bf16 that they stand for. Include after a vec_*.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

// A step of a panel, expanded: [16 pairs][32][2] bf16, as PairWeight reads it.
constexpr std::int64_t kExpandedBytes = packed::kStep * kPanel * 2;
constexpr int kPairLanes = static_cast<int>(kPanel) * 2;

struct Int8Weight {
  static constexpr std::int64_t kStepBytes = packed::kInt8Step;

  /// `step` is a step of the panel at `panel`.
  static SPECRT_INLINE void expand(const char* panel, const char* step, std::uint16_t* out) {
    const auto* scales = reinterpret_cast<const float*>(panel);
    const auto* codes = reinterpret_cast<const std::int8_t*>(step);
    for (int lane = 0; lane < kPairLanes; lane += kWidth) {
      const F scale = load_twice(scales + lane / 2);
      for (int pair = 0; pair < 16; ++pair) {
        const int at = pair * kPairLanes + lane;
        store_bf16(out + at, mul(load_i8(codes + at), scale));
      }
    }
  }
};

struct Int4Weight {
  static constexpr std::int64_t kStepBytes = packed::kInt4Step;

  static SPECRT_INLINE void expand(const char* panel, const char* step, std::uint16_t* out) {
    const auto* kinds = reinterpret_cast<const float*>(panel);
    const auto* halves = reinterpret_cast<const std::uint16_t*>(step);
    alignas(64) float scales[kPanel];
    alignas(64) float minima[kPanel];
    for (int lane = 0; lane < kPanel; lane += kWidth) {
      const F scale = load_half(halves + lane);
      const F kind = load(kinds + lane);
      // Times 1, or times the scale: both exactly.
      const F unit = fma(kind, scale, sub(set1(1.0f), kind));
      store(scales + lane, scale);
      store(minima + lane, mul(load_half(halves + kPanel + lane), unit));
    }
    for (int lane = 0; lane < kPairLanes; lane += kWidth) {
      const F scale = load_twice(scales + lane / 2);
      const F minimum = load_twice(minima + lane / 2);
      for (int half = 0; half < 2; ++half) {
        // Line 2g + half, with g = lane / 16.
        const I word =
            load_pairs(step + packed::kInt4Scales + (lane / 16 * 2 + half) * 64 + lane % 16 * 4);
        std::uint16_t* to = out + half * 8 * kPairLanes + lane;
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
          store_bf16(to + pair * kPairLanes, fma(nibble(word, 4 * pair), scale, minimum));
        }
      }
    }
  }
};

}  // namespace
}  // namespace specrt::cpu
