#pragma once

// Where the finished sums of a product go. Include after a vec_*.h.

#include "cpu/body_functions.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

/// Finished sums of one panel to y, with bias.
SPECRT_INLINE void write_panel(const GemmArgs& args, std::int64_t row, std::int64_t rows,
                               std::int64_t panel, const float* sums) {
  const std::int64_t first = panel * kPanel;
  const std::int64_t count = args.n - first < kPanel ? args.n - first : kPanel;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + first;
    const float* from = sums + r * kPanel;
    for (std::int64_t i = 0; i < count; i += kWidth) {
      const std::int64_t lanes = count - i < kWidth ? count - i : kWidth;
      const bool full = lanes == kWidth;
      F value = load(from + i);
      if (args.bias != nullptr) {
        const float* bias = args.bias + first + i;
        value = add(value, full ? load(bias) : load_part(bias, lanes));
      }
      if (args.accumulate) value = add(full ? load(y + i) : load_part(y + i, lanes), value);
      if (full) {
        store(y + i, value);
      } else {
        store_part(y + i, value, lanes);
      }
    }
  }
}

/// The gate's and the other panel's sums to y.
SPECRT_INLINE void write_gated(const GemmArgs& args, std::int64_t row, std::int64_t rows,
                               std::int64_t pair, const float* gates, const float* ups) {
  const std::int64_t first = pair * kPanel;
  const std::int64_t count = args.n - first < kPanel ? args.n - first : kPanel;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + 2 * first;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* y = args.y + (row + r) * args.y_stride + first;
    for (std::int64_t i = 0; i < count; i += kWidth) {
      F gate = load(gates + r * kPanel + i);
      F up = load(ups + r * kPanel + i);
      if (bias != nullptr) {
        gate = add(gate, load(bias + i));
        up = add(up, load(bias + kPanel + i));
      }
      F value = mul(args.gate == Gate::silu ? silu(gate) : gelu(gate), up);
      if (args.round) value = round_bf16(value);
      if (count - i >= kWidth) {
        store(y + i, value);
      } else {
        store_part(y + i, value, count - i);
      }
    }
  }
}

}  // namespace
}  // namespace specrt::cpu
