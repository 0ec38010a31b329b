#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "specrt/export.h"

namespace specrt {

/// A GPU that this process sees.
struct CudaDevice {
  std::string name;
  int architecture = 0;     ///< compute capability, major * 10 + minor
  std::int64_t memory = 0;  ///< bytes
};

/// Whether this library was built with CUDA (SPECRT_CUDA).
SPECRT_API bool cuda_built();

/// The GPUs of this machine; none where there is no driver. Throws UnsupportedError where the
/// library was built without CUDA.
SPECRT_API std::vector<CudaDevice> cuda_devices();

/// Bytes of a GPU's memory that nobody has taken. Throws as cuda_devices() does, and
/// InvalidArgument where there is no such GPU.
SPECRT_API std::int64_t cuda_free_memory(int device);

/// What this process has asked of GPUs since it began; a graph is one launch. For tests and
/// benchmarks, which look at differences.
struct CudaCounts {
  std::int64_t launches = 0;
  std::int64_t copies_to_host = 0;
  std::int64_t waits = 0;        ///< of the host for a GPU
  std::int64_t allocations = 0;  ///< of device memory and of pinned memory
};
/// Zeros where the library was built without CUDA.
SPECRT_API CudaCounts cuda_counts();

}  // namespace specrt
