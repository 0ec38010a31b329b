// The tests of CUDA kernels on the GPU that is here. --exact-memory is for compute-sanitizer, see
// memory.h; the rest are names, as specrt_tests takes them. Without a GPU: says so, and returns 4.

#include <cstdio>
#include <cstring>
#include <vector>

#include "../native/run_cases.h"
#include "device.h"
#include "memory.h"
#include "specrt/cuda.h"

int main(int argc, char** argv) {
  constexpr int kNoGpu = 4;
  bool exact = false;
  std::vector<char*> names = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--exact-memory") == 0) {
      exact = true;
    } else {
      names.push_back(argv[i]);
    }
  }
  const auto devices = specrt::cuda_devices();
  if (devices.empty()) {
    std::printf("no GPU: nothing was run\n");
    return kNoGpu;
  }
  std::printf("%s, sm_%d\n", devices[0].name.c_str(), devices[0].architecture);
  try {
    (void)specrt::cuda::architecture_of(0);
    cuda_test::share_memory(exact);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
  const int result = check::run_cases(static_cast<int>(names.size()), names.data());
  if (cuda_test::overruns() == 0) return result;
  std::printf("FAILED %zu allocations were written beyond\n", cuda_test::overruns());
  return 1;
}
