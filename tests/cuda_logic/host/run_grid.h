#pragma once

// Where the tests' kernels run: here on the host, thread by thread. The tests of the device have a
// header of the same name (tests/cuda_device).

#include "simt/host.h"

namespace cuda_test {

using specrt::simt::run_grid;

}  // namespace cuda_test
