#pragma once

// Arrays in device memory, for tests and benchmarks of ops.h.

#include <cstddef>
#include <vector>

#include "device.h"

namespace cuda_test {

template <typename T>
specrt::cuda::DeviceBuffer on_device(const std::vector<T>& values) {
  specrt::cuda::DeviceBuffer buffer(values.size() * sizeof(T));
  specrt::cuda::copy_to_device(buffer.data(), values.data(), buffer.size(), nullptr);
  specrt::cuda::synchronize(nullptr);
  return buffer;
}

template <typename T>
std::vector<T> from_device(const specrt::cuda::DeviceBuffer& buffer) {
  std::vector<T> values(buffer.size() / sizeof(T));
  specrt::cuda::copy_to_host(values.data(), buffer.data(), buffer.size(), nullptr);
  specrt::cuda::synchronize(nullptr);
  return values;
}

}  // namespace cuda_test
