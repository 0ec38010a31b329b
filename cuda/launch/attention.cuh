#pragma once

// A unit of its own for each type: every head size is a kernel that takes its time to compile.

#include "launch/launch.cuh"
#include "ops.h"

namespace specrt::cuda {

template <typename T>
void launch_attention(const AttentionArgs& args, std::int64_t rows, std::int64_t units,
                      Stream stream) {
  const simt::Grid grid{units, args.kv_heads, args.segments};
  if (args.head_dim <= 64) {
    launch<Attention<T, 64>>(grid, args, stream);
  } else if (args.head_dim <= 128) {
    launch<Attention<T, 128>>(grid, args, stream);
  } else {
    launch<Attention<T, 256>>(grid, args, stream);
  }
  if (args.segments > 1) launch<AttentionCombine<T>>({rows, args.q_heads}, args, stream);
}

extern template void launch_attention<simt::Bf16>(const AttentionArgs&, std::int64_t, std::int64_t,
                                                  Stream);
extern template void launch_attention<simt::Half>(const AttentionArgs&, std::int64_t, std::int64_t,
                                                  Stream);

}  // namespace specrt::cuda
