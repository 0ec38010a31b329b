#include "gemm/sm90_product.cuh"

namespace specrt::cuda {

template void sm90_product<true, 128>(const Sm90Product&, Stream);

}  // namespace specrt::cuda
