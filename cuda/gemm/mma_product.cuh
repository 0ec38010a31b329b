#pragma once

// The products of kernels/gemm.h, a unit for each type and form of weights.

#include "grids.h"
#include "launch/launch.cuh"

namespace specrt::cuda {

template <typename T, Stored kStored>
void mma_product(const GemmArgs& args, float* workspace, Stream stream) {
  mma_product<T, kStored>(OnGpu{stream}, args, workspace);
}

extern template void mma_product<simt::Bf16, Stored::plain>(const GemmArgs&, float*, Stream);
extern template void mma_product<simt::Half, Stored::plain>(const GemmArgs&, float*, Stream);
extern template void mma_product<simt::Bf16, Stored::int8>(const GemmArgs&, float*, Stream);
extern template void mma_product<simt::Bf16, Stored::int4>(const GemmArgs&, float*, Stream);

}  // namespace specrt::cuda
