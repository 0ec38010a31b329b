#include "gemm/sm90_product.cuh"

namespace specrt::cuda {

template void sm90_product<false, 16>(const Sm90Product&, Stream);

}  // namespace specrt::cuda
