#pragma once

// int8 weights times int8 activations. The sums are whole numbers, so their order is free. Include
// after body_gemm.h and body_math.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr std::int64_t kDotStep = packed::kW8a8K;
constexpr std::int64_t kPreparedTile = 16;  // rows

/// One row's scale; its codes go to out[0, kDotStep), out[kPreparedTile * kDotStep, ...) and so on.
SPECRT_INLINE float prepare_row(const float* x, std::int64_t k, std::int8_t* out) {
  F most = zero();
  F poison = zero();  // NaN as soon as one value is not finite
  for_vectors(k, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = load_lanes(x + i, lanes);
    most = max(max(value, sub(zero(), value)), most);
    poison = fma(value, zero(), poison);
  });
  const float top = reduce_max(most);
  const float scale = reduce_add(poison) == 0.0f ? top / 127.0f : __builtin_nanf("");
  // A scale that underflows would make infinite codes.
  const F inverse = set1(scale > 1e-36f ? 1.0f / scale : 0.0f);
  for (std::int64_t step = 0; step < k; step += kDotStep, out += kPreparedTile * kDotStep) {
    for (std::int64_t i = 0; i < kDotStep; i += kWidth) {
      const std::int64_t left = k - step - i;
      F value = zero();
      if (left > 0) value = load_lanes(x + step + i, left < kWidth ? left : kWidth);
      store_i8(out + i, mul(value, inverse));
    }
  }
  return scale;
}

void prepare_w8a8(const float* x, std::int64_t rows, std::int64_t x_stride, std::int64_t k,
                  std::int64_t row_begin, std::int64_t row_end, void* out) {
  const std::int64_t steps = packed::w8a8_steps_of(k);
  auto* codes = static_cast<std::int8_t*>(out);
  auto* scales = reinterpret_cast<float*>(codes + prepared_scales(rows, k));
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t tile = row / kPreparedTile * steps * kPreparedTile * kDotStep;
    std::int8_t* to = codes + tile + row % kPreparedTile * kDotStep;
    if (row < rows) {
      scales[row] = prepare_row(x + row * x_stride, k, to);
      continue;
    }
    scales[row] = 0.0f;
    for (std::int64_t step = 0; step < steps; ++step, to += kPreparedTile * kDotStep) {
      __builtin_memset(to, 0, kDotStep);
    }
  }
}

/// Sums of one panel to floats, for R rows of a tile of prepared x: scaled by output, then by row.
template <int R>
SPECRT_INLINE void dot_rows(const char* panel, const char* x, std::int64_t steps,
                            const float* scales, float* sums) {
  constexpr int kVectors = static_cast<int>(kPanel) / kWidth;
  const auto* output_scales = reinterpret_cast<const float*>(panel);
  const auto* w = reinterpret_cast<const std::int8_t*>(panel + packed::kHeader);
  Dot acc[R][kVectors];
  for (int i = 0; i < R * kVectors; ++i) acc[i / kVectors][i % kVectors] = no_dot();
  for (std::int64_t step = 0; step < steps; ++step, x += kPreparedTile * kDotStep) {
    for (std::int64_t quad = 0; quad < kDotStep; quad += 4, w += kPanel * 4) {
      __builtin_prefetch(w + 4096);
      __builtin_prefetch(w + 4096 + 64);
      Dot weights[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) weights[v] = dot_weights(w + v * kWidth * 4);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const I row = dot_row(x + r * kDotStep + quad);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_add(acc[r][v], weights[v], row);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const F scaled = mul(dot_sum(acc[r][v]), load(output_scales + v * kWidth));
      store(sums + r * kPanel + v * kWidth, mul(scaled, set1(scales[r])));
    }
  }
}

void gemm_w8a8(const GemmArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t steps = packed::w8a8_steps_of(args.k);
  const std::int64_t panel_size = packed::kHeader + steps * packed::kW8a8Step;
  const std::int64_t unit = args.gate == Gate::none ? 1 : 2;
  const char* weight = static_cast<const char*>(args.weight);
  const char* prepared = static_cast<const char*>(args.prepared);
  const auto* scales =
      reinterpret_cast<const float*>(prepared + prepared_scales(args.rows, args.k));
  alignas(64) float sums[2][kPreparedTile * kPanel];
  for (std::int64_t i = begin; i < end; ++i) {
    for (std::int64_t row = 0; row < args.rows; row += kPreparedTile) {
      const std::int64_t rows = args.rows - row < kPreparedTile ? args.rows - row : kPreparedTile;
      const char* x = prepared + row * steps * kDotStep;
      for (std::int64_t p = 0; p < unit; ++p) {
        const char* panel = weight + (i * unit + p) * panel_size;
        std::int64_t r = 0;
        for (; r + kDotRows <= rows; r += kDotRows) {
          dot_rows<kDotRows>(panel, x + r * kDotStep, steps, scales + row + r,
                             sums[p] + r * kPanel);
        }
        for (; r < rows; ++r) {
          dot_rows<1>(panel, x + r * kDotStep, steps, scales + row + r, sums[p] + r * kPanel);
        }
      }
      if (unit == 2) {
        write_gated(args, row, rows, i, sums[0], sums[1]);
      } else {
        write_panel(args, row, rows, i, sums[0]);
      }
    }
  }
}

}  // namespace
}  // namespace specrt::cpu
