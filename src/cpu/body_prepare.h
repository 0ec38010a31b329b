#pragma once

// Activations as whole numbers, for products with quantised weights. Include after a vec_*.h.

#include "cpu/body_functions.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr std::int64_t kLineStep = kPreparedTile * kLineBytes;  // from a line's step to the next

/// The nearest whole number, ties to even; |x| < 2^22.
SPECRT_INLINE F nearest(F x) {
  const F magic = set1(0x1.8p23f);
  return sub(add(x, magic), magic);
}

struct RowScale {
  float scale = 0.0f;  ///< NaN where the row has no finite maximum
  float inverse = 0.0f;
};

SPECRT_INLINE RowScale scale_of(const float* x, std::int64_t k, float most_code) {
  F most = zero();
  F poison = zero();  // NaN as soon as one value is not finite
  for_vectors(k, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = load_lanes(x + i, lanes);
    most = max(max(value, sub(zero(), value)), most);
    poison = fma(value, zero(), poison);
  });
  RowScale out;
  out.scale = reduce_add(poison) == 0.0f ? reduce_max(most) / most_code : __builtin_nanf("");
  // A scale that underflows would make infinite codes.
  out.inverse = out.scale > 1e-36f ? 1.0f / out.scale : 0.0f;
  return out;
}

/// Row `row` of x as codes in its lines of `out`, with what belongs to it behind them.
template <Precision kPrecision>
SPECRT_INLINE void prepare_row(const float* x, std::int64_t k, std::int64_t row,
                               const PreparedCodes& at, char* out) {
  constexpr bool kOnePlane = kPrecision == Precision::w8a8;
  constexpr bool kGroups = kPrecision == Precision::int4;
  constexpr float kBase = kGroups ? 16.0f : 256.0f;
  constexpr std::int64_t kSpan = PreparedCodes::span(kPrecision);
  const RowScale scale = scale_of(x, k, PreparedCodes::most(kPrecision));
  auto* to = reinterpret_cast<std::int8_t*>(out + at.line(row * at.planes));
  auto* sums = reinterpret_cast<std::int32_t*>(out + at.sums()) + row * at.planes;
  auto* groups = reinterpret_cast<float*>(out + at.groups()) + at.group(row);
  reinterpret_cast<float*>(out + at.scales())[row] = scale.scale;
  const bool good = scale.scale == scale.scale;
  const F inverse = set1(scale.inverse);
  F first = zero();  // sums of the planes and of a group: whole numbers below 2^24
  F second = zero();
  for (std::int64_t step = 0; step < k; step += kSpan, to += kLineStep) {
    F group = zero();
    for (std::int64_t i = 0; i < kSpan; i += kWidth) {
      const std::int64_t left = k - step - i;
      F value = zero();
      if (left > 0 && good) value = load_lanes(x + step + i, left < kWidth ? left : kWidth);
      const F code = nearest(mul(value, inverse));
      if constexpr (kOnePlane) {
        store_i8(to + i, code);
        first = add(first, code);
      } else {
        // code = base * high + low, low from -base / 2 up to below base / 2; halves never tie.
        const F high = nearest(fma(code, set1(1.0f / kBase), set1(0.5f / kBase)));
        const F low = fma(high, set1(-kBase), code);
        store_i8(to + i, high);
        store_i8(to + kSpan + i, low);
        first = add(first, high);
        second = add(second, low);
        group = add(group, code);
      }
    }
    if constexpr (kGroups) {
      *groups = reduce_add(group);
      groups += kPreparedTile;
    }
  }
  if constexpr (!kGroups) sums[0] = static_cast<std::int32_t>(reduce_add(first));
  if constexpr (!kGroups && !kOnePlane) sums[1] = static_cast<std::int32_t>(reduce_add(second));
}

template <Precision kPrecision>
void prepare_codes(const float* x, std::int64_t rows, std::int64_t x_stride, std::int64_t k,
                   std::int64_t row_begin, std::int64_t row_end, void* prepared) {
  const PreparedCodes at(rows, k, kPrecision);
  auto* out = static_cast<char*>(prepared);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    if (row < rows) {
      prepare_row<kPrecision>(x + row * x_stride, k, row, at, out);
      continue;
    }
    // Lines that fill up the last tile.
    for (std::int64_t line = row * at.planes; line < (row + 1) * at.planes; ++line) {
      if (line >= at.lines) break;
      reinterpret_cast<std::int32_t*>(out + at.sums())[line] = 0;
      char* to = out + at.line(line);
      for (std::int64_t step = 0; step < at.steps; ++step, to += kLineStep) {
        __builtin_memset(to, 0, kLineBytes);
      }
    }
  }
}

}  // namespace
}  // namespace specrt::cpu
