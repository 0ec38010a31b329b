#include "gemm/mma_product.cuh"

namespace specrt::cuda {

template void mma_product<simt::Bf16, Stored::int4>(const GemmArgs&, float*, Stream);

}  // namespace specrt::cuda
