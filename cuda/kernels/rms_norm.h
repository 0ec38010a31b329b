#pragma once

// RMSNorm (Zhang and Sennrich, 1910.07467) of rows, a block a row.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct RmsNormArgs {
  const float* x = nullptr;            ///< [any, x_stride]
  const std::int32_t* rows = nullptr;  ///< [rows] of x; negative: zeros; null: all in order
  const float* weight = nullptr;       ///< [width]; null: x alone is converted
  void* out = nullptr;                 ///< [rows, out_stride] of the kernel's type
  std::int64_t x_stride = 0;
  std::int64_t out_stride = 0;  ///< what lies between width and here is set to zero
  std::int64_t width = 0;
  float eps = 0.0f;
};

/// out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight, as T. Grid: rows.
template <typename T>
struct RmsNorm {
  static constexpr int kThreads = 256;
  using Args = RmsNormArgs;
  struct Shared {
    float partial[kThreads / simt::kWarp];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const std::int64_t row = args.rows == nullptr ? block.x() : args.rows[block.x()];
    const bool there = row >= 0;
    const float* x = args.x + (there ? row : 0) * args.x_stride;
    T* out = static_cast<T*>(args.out) + block.x() * args.out_stride;
    float scale = 1.0f;
    if (args.weight != nullptr) {
      float sum = 0.0f;
      for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
        sum = fused(x[i], x[i], sum);
      }
      sum = simt::block_sum<kThreads>(block, sum, shared.partial);
      scale = 1.0f / square_root(sum / static_cast<float>(args.width) + args.eps);
    }
    for (std::int64_t i = block.thread(); i < args.out_stride; i += kThreads) {
      float value = 0.0f;
      if (there && i < args.width)
        value = args.weight == nullptr ? x[i] : x[i] * scale * args.weight[i];
      out[i] = from_float<T>(value);
    }
  }
};

}  // namespace specrt::cuda
