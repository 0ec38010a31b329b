#include "launch/attention.cuh"

namespace specrt::cuda {

template void launch_attention<simt::Bf16>(const AttentionArgs&, std::int64_t, std::int64_t,
                                           Stream);

}  // namespace specrt::cuda
