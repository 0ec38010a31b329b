#pragma once

// What a product means for kernels/gemm.h, the same on a GPU and on the emulated device.

#include "kernels/gemm.h"
#include "ops.h"

namespace specrt::cuda {

/// More tokens than this take all splits in one block, so that partial sums stay few.
inline constexpr std::int64_t kMostParallel = 64;

/// As workspace_bytes() of ops.h: partial sums of few rows, or one sum of a gated product.
inline std::int64_t bytes_of_sums(const DeviceMatrix& matrix, std::int64_t rows) {
  const std::int64_t parallel = rows < kMostParallel ? rows : kMostParallel;
  const std::int64_t partial = splits_of(matrix.n, matrix.k) * parallel;
  return (partial > rows ? partial : rows) * matrix.n * static_cast<std::int64_t>(sizeof(float));
}

inline GemmArgs gemm_args(const DeviceMatrix& matrix, const Product& args) {
  GemmArgs gemm;
  gemm.x = args.x;
  gemm.x_stride = padded_columns(matrix.k);
  gemm.weight = matrix.data;
  gemm.scales = matrix.scales;
  gemm.bias = args.bias;
  gemm.y = args.y;
  gemm.y_stride = args.y_stride;
  gemm.rows = args.rows;
  gemm.n = matrix.n;
  gemm.k = matrix.k;
  gemm.splits = static_cast<std::int32_t>(splits_of(matrix.n, matrix.k));
  gemm.after = args.after;
  return gemm;
}

}  // namespace specrt::cuda
