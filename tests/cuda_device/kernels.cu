// What the tests launch and the library does not have.

#include "../cuda_logic/shim_kernels.h"
#include "kernels/rms_norm.h"
#include "launch/launch.cuh"

namespace specrt::cuda {

template void launch<RmsNorm<float>>(simt::Grid, const RmsNormArgs&, Stream);
template void launch<cuda_test::Reverse>(simt::Grid, const cuda_test::ReverseArgs&, Stream);
template void launch<cuda_test::Copies>(simt::Grid, const cuda_test::CopiesArgs&, Stream);
template void launch<cuda_test::Lanes>(simt::Grid, const cuda_test::LanesArgs&, Stream);
template void launch<cuda_test::Numbers>(simt::Grid, const cuda_test::NumbersArgs&, Stream);
template void launch<cuda_test::Mma<Bf16>>(simt::Grid, const cuda_test::MmaArgs<Bf16>&, Stream);
template void launch<cuda_test::Mma<Half>>(simt::Grid, const cuda_test::MmaArgs<Half>&, Stream);

}  // namespace specrt::cuda
