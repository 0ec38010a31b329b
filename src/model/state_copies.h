#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device.h"
#include "specrt/features.h"

namespace specrt {

class CudaRunner;

/// Copies of hidden states between places in a device's memory, put on a stream many at a time.
class StateCopies {
 public:
  explicit StateCopies(int device);
  static constexpr std::int64_t device_bytes() { return 2 * kMost * std::int64_t{sizeof(float*)}; }

  /// Of `width` floats; those with an `owner` are copied behind its last pass and before its next.
  /// They go out with flush(), or before where more of them come than there is room for.
  void add(const float* from, float* to, std::int64_t width, cuda::Stream stream,
           CudaRunner* owner = nullptr);
  /// Throws InvalidArgument where features are in the host's memory, or another device's.
  void check(const FeatureRows& from) const;
  /// Token i's features, which were checked, one behind the other.
  void add_features(const FeatureRows& from, std::int64_t i, float* to, cuda::Stream stream);
  void flush(cuda::Stream stream);

 private:
  static constexpr std::int64_t kMost = 1024;

  int device_;
  std::vector<const float*> from_;
  std::vector<float*> to_;
  std::int64_t width_ = 0;
  CudaRunner* owner_ = nullptr;
  cuda::DeviceBuffer list_;  // [2, kMost] pointers
  cuda::HostBuffer staging_;
  cuda::Event sent_;
  cuda::Event made_;
  cuda::Event done_;
};

}  // namespace specrt
