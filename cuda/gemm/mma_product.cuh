#pragma once

// The products of kernels/gemm.h, a unit for each type and form of weights.

#include "gemm/arguments.h"
#include "launch/launch.cuh"
#include "ops.h"

namespace specrt::cuda {

template <typename T, Stored kStored>
void mma_product(GemmArgs args, float* workspace, Stream stream) {
  args.parallel = args.splits > 1 && args.rows <= kMostParallel;
  args.partials = workspace;
  const std::int64_t columns = (panels_of(args.n) + kBlockPanels - 1) / kBlockPanels;
  const std::int64_t splits = args.parallel ? args.splits : 1;
  const auto grid = [&](std::int64_t tokens) {
    return simt::Grid{columns, (args.rows + tokens - 1) / tokens, splits};
  };
  if (args.rows <= 16) {
    launch<Gemm<T, kStored, 16>>(grid(16), args, stream);
  } else if (args.rows <= 32) {
    launch<Gemm<T, kStored, 32>>(grid(32), args, stream);
  } else {
    // A wider tile would not fit into registers, with sums of a split and of all beside each other.
    launch<Gemm<T, kStored, 64>>(grid(64), args, stream);
  }
  if (!args.parallel) return;
  const FinishArgs finish{workspace, args.bias,     args.y,      args.rows,
                          args.n,    args.y_stride, args.splits, args.after};
  const bool gated = args.after == After::gate_silu || args.after == After::gate_gelu;
  const std::int64_t outputs = gated ? args.y_stride : args.n;
  launch<FinishProduct<T>>({(outputs + 255) / 256, args.rows}, finish, stream);
}

extern template void mma_product<simt::Bf16, Stored::plain>(GemmArgs, float*, Stream);
extern template void mma_product<simt::Half, Stored::plain>(GemmArgs, float*, Stream);
extern template void mma_product<simt::Bf16, Stored::int8>(GemmArgs, float*, Stream);
extern template void mma_product<simt::Bf16, Stored::int4>(GemmArgs, float*, Stream);

}  // namespace specrt::cuda
