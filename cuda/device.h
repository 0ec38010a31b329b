#pragma once

// GPUs, their memory and streams, without a CUDA type in sight: what the layers above include
// whether or not the library was built with CUDA. Without it every function throws
// UnsupportedError (src/no_cuda), but for cuda_built().

#include <cstddef>
#include <cstdint>
#include <string>

// cudaStream_t is a pointer to this.
struct CUstream_st;

namespace specrt::cuda {

using Stream = CUstream_st*;

/// The compute capability of a device, major * 10 + minor. Throws UnsupportedError below 80.
int architecture_of(int device);

/// Device memory, freed at the end. Throws CapacityError where there is not enough; the engine that
/// asked can go on.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);  ///< zeros
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream);
/// Returns when all that was put on the stream is done. Throws InternalError where a kernel failed;
/// the message says whether the device can be used further.
void synchronize(Stream stream);

}  // namespace specrt::cuda
