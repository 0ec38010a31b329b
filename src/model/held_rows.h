#pragma once

#include <cstdint>
#include <vector>

#include "device.h"

namespace specrt {

/// Rows of floats where a Runner computes: in the host's memory, or in its device's, where the host
/// knows no more than their addresses.
class HeldRows {
 public:
  HeldRows() = default;
  HeldRows(std::int64_t rows, std::int64_t width, bool on_device) : width_(width) {
    const auto count = static_cast<std::size_t>(rows * width);
    if (on_device) {
      device_ = cuda::DeviceBuffer(count * sizeof(float));
      data_ = reinterpret_cast<float*>(device_.data());
    } else {
      host_.resize(count);
      data_ = host_.data();
    }
  }

  float* row(std::int64_t i) const { return data_ + i * width_; }

 private:
  std::int64_t width_ = 0;
  std::vector<float> host_;
  cuda::DeviceBuffer device_;
  float* data_ = nullptr;
};

}  // namespace specrt
