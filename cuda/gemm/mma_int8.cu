#include "gemm/mma_product.cuh"

namespace specrt::cuda {

template void mma_product<simt::Bf16, Stored::int8>(const GemmArgs&, float*, Stream);

}  // namespace specrt::cuda
