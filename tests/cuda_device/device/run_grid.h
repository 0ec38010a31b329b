#pragma once

// Where the tests' kernels run: on the GPU. Their arguments point into memory of the host that the
// device reads and writes (memory.cpp), so the tests are the host's, unchanged.

#include "device.h"
#include "simt/block.h"
#include "simt/order.h"

namespace specrt::cuda {

/// launch/launch.cuh's, whose instantiations are in the library's objects and in kernels.cu.
template <class Kernel>
void launch(simt::Grid grid, const typename Kernel::Args& args, Stream stream);

}  // namespace specrt::cuda

namespace cuda_test {

/// Threads run as the GPU has them: what `order` asks for is only another run.
template <class Kernel>
void run_grid(specrt::simt::Grid grid, const typename Kernel::Args& args,
              specrt::simt::Order = specrt::simt::Order::forward) {
  specrt::cuda::launch<Kernel>(grid, args, nullptr);
  specrt::cuda::synchronize(nullptr);
}

}  // namespace cuda_test
