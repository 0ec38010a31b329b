#include <utility>

#include "device.h"
#include "launch/launch.cuh"
#include "specrt/cuda.h"

namespace specrt {

bool cuda_built() { return true; }

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  // No driver, or none that is new enough: no GPU, and nothing that a later call should stumble on.
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    cuda::check(cudaGetDeviceProperties(&properties, i), "device");
    devices.push_back({properties.name, properties.major * 10 + properties.minor,
                       static_cast<std::int64_t>(properties.totalGlobalMem)});
  }
  return devices;
}

}  // namespace specrt

namespace specrt::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string text = std::string("[cuda] ") + what + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw CapacityError(text + "; the engine can go on");
  // An error of a kernel stays with the context: whatever is asked next fails too.
  const bool sticky = cudaDeviceSynchronize() != cudaSuccess;
  throw InternalError(text + (sticky ? "; the device cannot be used any more by this process"
                                     : "; the engine can go on"));
}

int architecture_of(int device) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device");
  const int architecture = major * 10 + minor;
  if (architecture < 80) {
    throw UnsupportedError(expected_got("device", "compute capability 8.0 or higher",
                                        std::to_string(major) + "." + std::to_string(minor)));
  }
  return architecture;
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "memory");
  data_ = static_cast<std::byte*>(data);
  check(cudaMemset(data_, 0, bytes), "memory");
}

DeviceBuffer::~DeviceBuffer() {
  // At the process's end the driver may be gone already; there is nothing left to do then.
  if (data_ != nullptr) (void)cudaFree(data_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "copy");
}

void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copy");
}

void synchronize(Stream stream) { check(cudaStreamSynchronize(stream), "a kernel"); }

}  // namespace specrt::cuda
