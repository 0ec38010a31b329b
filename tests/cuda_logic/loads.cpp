// A program that links the library alone: it starts whether or not the machine has a driver, and
// the library knows whether it was built with CUDA.

#include <cstdio>
#include <fstream>
#include <string>

#include "specrt/cuda.h"
#include "specrt/error.h"

int main() {
#if defined(SPECRT_WITH_CUDA)
  constexpr bool kBuilt = true;
#else
  constexpr bool kBuilt = false;
#endif
  bool good = specrt::cuda_built() == kBuilt;
  try {
    const auto devices = specrt::cuda_devices();
    good = good && kBuilt;
    std::printf("%zu GPUs\n", devices.size());
    for (const specrt::CudaDevice& device : devices) {
      std::printf("%s, sm_%d, %.1f GB\n", device.name.c_str(), device.architecture,
                  static_cast<double>(device.memory) / 1e9);
    }
  } catch (const specrt::UnsupportedError& error) {
    good = good && !kBuilt &&
           std::string(error.what()).find("built without CUDA") != std::string::npos;
  }
  // The driver's library is no part of the process unless somebody asked for a GPU that is there.
  std::ifstream maps("/proc/self/maps");
  std::string line;
  bool driver = false;
  while (std::getline(maps, line)) driver = driver || line.find("libcuda.so") != std::string::npos;
  if (!kBuilt) good = good && !driver;
  std::printf("%d passed, %d failed\n", good ? 1 : 0, good ? 0 : 1);
  return good ? 0 : 1;
}
