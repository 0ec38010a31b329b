#pragma once

// A unit of its own for each type: every head size is a kernel that takes its time to compile.

#include "grids.h"
#include "launch/launch.cuh"

namespace specrt::cuda {

template <typename T>
void launch_attention(const AttentionArgs& args, std::int64_t rows, std::int64_t units,
                      Stream stream) {
  attention<T>(OnGpu{stream}, args, rows, units);
}

extern template void launch_attention<simt::Bf16>(const AttentionArgs&, std::int64_t, std::int64_t,
                                                  Stream);
extern template void launch_attention<simt::Half>(const AttentionArgs&, std::int64_t, std::int64_t,
                                                  Stream);

}  // namespace specrt::cuda
