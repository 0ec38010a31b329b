#pragma once

// GPUs, their memory and streams, without a CUDA type in sight: what the layers above include
// whether or not the library was built with CUDA. Without it every function throws
// UnsupportedError (src/no_cuda), but for cuda_built().

#include <cstddef>
#include <cstdint>

// cudaStream_t is a pointer to this.
struct CUstream_st;

namespace specrt::cuda {

using Stream = CUstream_st*;

/// The compute capability of a device, major * 10 + minor. Throws UnsupportedError below 80.
int architecture_of(int device);

/// Makes a device the one that this thread's calls are about. Throws InvalidArgument where there is
/// no such device. Cheap where nothing changes.
void use_device(int device);

struct DeviceRoom {
  std::int64_t free = 0;
  std::int64_t total = 0;
};
/// Memory of the thread's device, bytes.
DeviceRoom device_room();

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

/// Pinned host memory, which copies to and from while the host goes on.
class HostBuffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(std::size_t bytes);  ///< zeros
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// A stream of its own, which waits for no other.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

/// A place in a stream.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream);
  /// Returns when the stream has come to where it was last recorded; at once where it never was.
  void wait();
  /// What is put on `stream` from here on waits for that, and the host does not.
  void hold(Stream stream);

 private:
  void* event_ = nullptr;
};

/// What was put on a stream between begin_capture() and end_capture(), to be put there again in one
/// call: the same kernels with the same arguments, which read what is in memory by then.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  bool valid() const { return graph_ != nullptr; }
  void launch(Stream stream) const;

 private:
  friend Graph end_capture(Stream stream);
  void* graph_ = nullptr;
};
/// Nothing runs until the capture has ended and the graph is launched.
void begin_capture(Stream stream);
Graph end_capture(Stream stream);
/// Ends a capture that failed, of which nothing is left.
void abandon_capture(Stream stream) noexcept;

// `from` and `to` of the host are to stay until the copy is done (synchronize(), Event::wait()).
void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream);
/// Sets every byte.
void fill(void* to, int byte, std::size_t bytes, Stream stream);
/// Returns when all that was put on the stream is done. Throws DeviceError where a kernel failed;
/// the message says whether the device can be used further.
void synchronize(Stream stream);

}  // namespace specrt::cuda
