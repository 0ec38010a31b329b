#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "model/weights.h"
#include "ops.h"

namespace specrt {

/// What products of a model of that precision read, and its KV cache and embeddings are in.
cuda::Type cuda_type_of(Precision precision);

/// Where a piece of a model lies in device memory.
struct CudaPiece {
  WeightEntry::Kind kind = WeightEntry::Kind::vector;
  std::int64_t n = 0;  ///< of gate and up: both, each filled up to whole turns (cuda::kGateRows)
  std::int64_t k = 1;
  cuda::Stored stored = cuda::Stored::plain;
  bool row_major = false;
  std::int64_t offset = 0;
  std::int64_t scales = -1;  ///< offset of [n] floats; -1: none
};

/// The layout follows from what there is and the architecture alone. `gated_outputs` are those of
/// each gate.
struct CudaLayout {
  std::map<std::string, CudaPiece> pieces;
  std::int64_t bytes = 0;
};
CudaLayout cuda_layout(const std::map<std::string, WeightEntry>& entries,
                       std::int64_t gated_outputs, int architecture);

/// Weights on the device by name, in the order in which its kernels read them.
class CudaArena {
 public:
  /// Finds an entry and where the host has it.
  using Find = std::function<const WeightEntry*(const std::string& name, const std::byte** at)>;
  /// Copies all to the thread's device, a share at a time. Throws CapacityError where they do not
  /// fit.
  CudaArena(CudaLayout layout, const Find& find, std::int64_t gated_outputs);

  std::int64_t bytes() const { return static_cast<std::int64_t>(buffer_.size()); }
  /// Null, or without data, where there is none of that name.
  const void* find(const std::string& name) const;
  const float* vector(const std::string& name) const {
    return static_cast<const float*>(find(name));
  }
  cuda::DeviceMatrix matrix(const std::string& name) const;

 private:
  CudaLayout layout_;
  cuda::DeviceBuffer buffer_;
};

}  // namespace specrt
