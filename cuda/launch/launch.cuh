#pragma once

// Block programs as kernels, and CUDA's errors as exceptions.

#include <cuda_runtime.h>

#include <string>

#include "device.h"
#include "simt/block.h"
#include "specrt/device_error.h"

namespace specrt::cuda {

/// Enters a launch in cuda_counts().
void count_launch();

/// Throws where `status` is an error: CapacityError for memory, DeviceError for the rest, which
/// says whether the device can be used further.
void check(cudaError_t status, const char* what);

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) enter(const typename Kernel::Args args) {
  extern __shared__ __align__(128) unsigned char memory[];
  Kernel::run(simt::DeviceBlock{}, *reinterpret_cast<typename Kernel::Shared*>(memory), args);
}

/// [[gnu::used]]: the tests on a GPU (tests/cuda_device) call other units' instantiations.
template <class Kernel>
[[gnu::used]] void launch(simt::Grid grid, const typename Kernel::Args& args, Stream stream) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr std::size_t kShared = sizeof(typename Kernel::Shared);
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if constexpr (kShared > kWithoutAsking) {
    check(cudaFuncSetAttribute(enter<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "shared memory");
  }
  constexpr std::int64_t kMost = 65535;  // of y and z
  if (grid.x > INT32_MAX || grid.y > kMost || grid.z > kMost) {
    throw InternalError(expected_got("grid", "at most 2^31 - 1 by 65535 by 65535",
                                     std::to_string(grid.x) + " by " + std::to_string(grid.y) +
                                         " by " + std::to_string(grid.z)));
  }
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                    static_cast<unsigned>(grid.z));
  enter<Kernel><<<blocks, Kernel::kThreads, kShared, stream>>>(args);
  check(cudaGetLastError(), "launch");
  count_launch();
}

/// A stream of a GPU, as grids.h takes it.
struct OnGpu {
  Stream stream;
  template <class Kernel>
  void launch(simt::Grid grid, const typename Kernel::Args& args) const {
    cuda::launch<Kernel>(grid, args, stream);
  }
};

/// Calls use(T{}) for the type.
template <typename Use>
void by_type(bool bf16, const Use& use) {
  if (bf16) {
    use(simt::Bf16{});
  } else {
    use(simt::Half{});
  }
}

}  // namespace specrt::cuda
