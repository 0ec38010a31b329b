#include "gemm/mma_product.cuh"

namespace specrt::cuda {

template void mma_product<simt::Bf16, Stored::plain>(const GemmArgs&, float*, Stream);

}  // namespace specrt::cuda
