#include <atomic>
#include <cstring>
#include <utility>

#include "device.h"
#include "launch/launch.cuh"
#include "specrt/cuda.h"

namespace specrt {
namespace {

std::atomic<std::int64_t> launches;
std::atomic<std::int64_t> copies_to_host;
std::atomic<std::int64_t> waits;
std::atomic<std::int64_t> allocations;

void count(std::atomic<std::int64_t>& what) { what.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

CudaCounts cuda_counts() { return {launches, copies_to_host, waits, allocations}; }

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

void count_launch() { count(launches); }

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string text = std::string("[cuda] ") + what + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw CapacityError(text + "; the engine can go on");
  // An error of a kernel stays with the context: whatever is asked next fails too. While a stream
  // is captured the question itself is refused, which says nothing.
  const cudaError_t after = cudaDeviceSynchronize();
  (void)cudaGetLastError();
  const bool usable = after == cudaSuccess || after == cudaErrorStreamCaptureUnsupported ||
                      after == cudaErrorStreamCaptureImplicit;
  throw DeviceError(
      text + (usable ? "; the engine can go on" : "; this process cannot use the device any more"),
      usable);
}

void use_device(int device) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "device");
  if (device < 0 || device >= count) {
    throw InvalidArgument(expected_got("device", "one of " + std::to_string(count) + " GPUs",
                                       "cuda:" + std::to_string(device)));
  }
  check(cudaSetDevice(device), "device");
}

DeviceRoom device_room() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "memory");
  return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
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
  count(allocations);
  data_ = static_cast<std::byte*>(data);
  // On the default stream, for which streams of their own do not wait.
  check(cudaMemset(data_, 0, bytes), "memory");
  check(cudaStreamSynchronize(nullptr), "memory");
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

HostBuffer::HostBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocDefault), "pinned memory");
  count(allocations);
  data_ = static_cast<std::byte*>(data);
  std::memset(data_, 0, bytes);
}

HostBuffer::~HostBuffer() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

OwnStream::OwnStream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}

OwnStream::~OwnStream() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Event::Event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  event_ = event;
}

Event::~Event() {
  if (event_ != nullptr) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

void Event::record(Stream stream) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(event_), stream), "event");
}

void Event::hold(Stream stream) {
  check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event_), 0), "event");
}

void Event::wait() {
  const cudaError_t past = cudaEventQuery(static_cast<cudaEvent_t>(event_));
  if (past != cudaErrorNotReady) {
    check(past, "a kernel");
    return;
  }
  count(waits);
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)), "a kernel");
}

Graph::~Graph() {
  if (graph_ != nullptr) (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
}

Graph::Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(graph_, other.graph_);
  return *this;
}

void Graph::launch(Stream stream) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), stream), "graph");
  count(launches);
}

void begin_capture(Stream stream) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
}

Graph end_capture(Stream stream) {
  cudaGraph_t recorded = nullptr;
  check(cudaStreamEndCapture(stream, &recorded), "capture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, recorded, 0);
  (void)cudaGraphDestroy(recorded);
  check(status, "graph");
  Graph graph;
  graph.graph_ = executable;
  return graph;
}

void abandon_capture(Stream stream) noexcept {
  cudaGraph_t recorded = nullptr;
  if (cudaStreamEndCapture(stream, &recorded) == cudaSuccess && recorded != nullptr) {
    (void)cudaGraphDestroy(recorded);
  }
  (void)cudaGetLastError();
}

void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "copy");
}

void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copy");
  count(copies_to_host);
}

void fill(void* to, int byte, std::size_t bytes, Stream stream) {
  check(cudaMemsetAsync(to, byte, bytes, stream), "memory");
}

void synchronize(Stream stream) {
  count(waits);
  check(cudaStreamSynchronize(stream), "a kernel");
}

}  // namespace specrt::cuda
