#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "emulated/stream.h"
#include "specrt/cuda.h"
#include "specrt/device_error.h"

namespace specrt {

bool cuda_built() { return true; }

CudaCounts cuda_counts() {
  const cuda::emulated::Counts& c = cuda::emulated::counts();
  return {c.calls, c.to_host, c.waits, c.allocations};
}

std::vector<CudaDevice> cuda_devices() {
  const cuda::emulated::Settings& s = cuda::emulated::settings();
  return std::vector<CudaDevice>(static_cast<std::size_t>(s.devices),
                                 {"emulated", s.architecture, s.memory});
}

namespace cuda {
namespace emulated {
namespace {

// One at a time: whoever runs streams has the memory mapped for itself.
std::recursive_mutex mutex;

/// Address space that is nobody's to read or write while no stream runs.
class Memory {
 public:
  static constexpr std::size_t kRoom = std::size_t{8} << 30;
  static constexpr std::size_t kPage = 4096;

  Memory() {
    void* at =
        ::mmap(nullptr, kRoom, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw CapacityError("[cuda] no address space for emulated memory");
    base_ = static_cast<std::byte*>(at);
  }
  std::byte* take(std::size_t bytes) {
    const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
    std::size_t at = 0;  // the first gap that is wide enough
    for (const auto& [begin, size] : taken_) {
      if (begin - at >= whole) break;
      at = begin + size;
    }
    const auto limit = static_cast<std::size_t>(settings().memory);
    if (used_ + whole > limit || at + whole > kRoom) {
      throw CapacityError("[cuda] memory: out of memory (" + std::to_string(bytes) +
                          " bytes asked for, " + std::to_string(limit - std::min(limit, used_)) +
                          " free); the engine can go on");
    }
    taken_[at] = whole;
    used_ += whole;
    top_ = std::max(top_, at + whole);
    if (open_ > 0) protect(PROT_READ | PROT_WRITE);
    const Open open(*this);
    std::memset(base_ + at, 0, whole);
    return base_ + at;
  }
  void give(std::byte* data) {
    const auto found = taken_.find(static_cast<std::size_t>(data - base_));
    used_ -= found->second;
    taken_.erase(found);
  }
  bool holds(const void* at, std::size_t bytes) const {
    const auto* from = static_cast<const std::byte*>(at);
    if (from < base_ || from >= base_ + kRoom) return false;
    const auto begin = static_cast<std::size_t>(from - base_);
    auto after = taken_.upper_bound(begin);
    if (after == taken_.begin()) return false;
    --after;
    return begin + bytes <= after->first + after->second;
  }
  bool near(const void* at) const {
    const auto* from = static_cast<const std::byte*>(at);
    return from >= base_ && from < base_ + kRoom;
  }
  std::size_t used() const { return used_; }

  struct Open {
    explicit Open(Memory& memory) : memory_(memory) {
      if (memory_.open_++ == 0) memory_.protect(PROT_READ | PROT_WRITE);
    }
    ~Open() {
      if (--memory_.open_ == 0) memory_.protect(PROT_NONE);
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    Memory& memory_;
  };

 private:
  void protect(int how) const {
    if (top_ > 0) ::mprotect(base_, top_, how);
  }
  std::byte* base_ = nullptr;
  std::map<std::size_t, std::size_t> taken_;
  std::size_t used_ = 0;
  std::size_t top_ = 0;
  int open_ = 0;
};

Memory& memory() {
  static Memory one;
  return one;
}

/// What waits in a stream.
struct Work {
  std::function<void()> run;
  bool kernel = false;
};

struct Queue : std::enable_shared_from_this<Queue> {
  std::deque<Work> work;
  std::int64_t done = 0;  // of all that was ever put here
  bool capturing = false;
  std::vector<Work> captured;
};

struct Marker {
  std::shared_ptr<Queue> queue;
  std::int64_t at = 0;
};

// A stream is gone with its owner, but for those that still wait for it.
std::map<Queue*, std::shared_ptr<Queue>>& queues() {
  static std::map<Queue*, std::shared_ptr<Queue>> all;
  return all;
}

Queue& queue_of(Stream stream) {
  static const auto standard = std::make_shared<Queue>();
  return stream == nullptr ? *standard : *reinterpret_cast<Queue*>(stream);
}

bool lost = false;

[[noreturn]] void fail() {
  throw DeviceError(
      "[cuda] a kernel: an illegal memory access was encountered; this process cannot use the "
      "device any more",
      false);
}

void require_well() {
  if (lost) fail();
}

void run_until(Queue& queue, std::int64_t end) {
  const Memory::Open open(memory());
  while (queue.done < end) {
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    ++queue.done;
    if (work.kernel) {
      const std::int64_t number = counts().launches++;
      if (number == settings().fail_at) lost = true;
      require_well();
    }
    work.run();
  }
}

void put_work(Queue& queue, Work work) {
  require_well();
  if (queue.capturing) {
    queue.captured.push_back(std::move(work));
  } else {
    queue.work.push_back(std::move(work));
  }
}

}  // namespace

Settings& settings() {
  static Settings one;
  return one;
}
Counts& counts() {
  static Counts one;
  return one;
}
std::int64_t in_use() { return static_cast<std::int64_t>(memory().used()); }
void reset() {
  settings() = {};
  counts() = {};
  lost = false;
}

std::vector<std::byte> look(const void* from, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const Memory::Open open(memory());
  const auto* data = static_cast<const std::byte*>(from);
  return {data, data + bytes};
}

void put(Stream stream, std::function<void()> kernel) {
  const std::lock_guard lock(mutex);
  ++counts().calls;
  put_work(queue_of(stream), {std::move(kernel), true});
}

void require_on_device(const void* at, const char* what) {
  if (at != nullptr && !memory().near(at)) {
    throw InternalError(expected_got(what, "device memory", "the host's"));
  }
}

}  // namespace emulated

using namespace emulated;

int architecture_of(int device) {
  use_device(device);
  return settings().architecture;
}

void use_device(int device) {
  require_well();
  if (device < 0 || device >= settings().devices) {
    throw InvalidArgument(expected_got("device",
                                       "one of " + std::to_string(settings().devices) + " GPUs",
                                       "cuda:" + std::to_string(device)));
  }
}

DeviceRoom device_room() { return {settings().memory - in_use(), settings().memory}; }

DeviceBuffer::DeviceBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex);
  require_well();
  data_ = memory().take(bytes);
  ++counts().allocations;
}
DeviceBuffer::~DeviceBuffer() {
  const std::lock_guard lock(mutex);
  if (data_ != nullptr) memory().give(data_);
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
  require_well();
  data_ = new std::byte[bytes]();
  ++counts().allocations;
}
HostBuffer::~HostBuffer() { delete[] data_; }
HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

OwnStream::OwnStream() {
  const std::lock_guard lock(mutex);
  require_well();
  auto queue = std::make_shared<Queue>();
  stream_ = reinterpret_cast<Stream>(queue.get());
  queues().emplace(queue.get(), std::move(queue));
}
OwnStream::~OwnStream() {
  const std::lock_guard lock(mutex);
  queues().erase(reinterpret_cast<Queue*>(stream_));
}

Event::Event() : event_(new Marker()) {}
Event::~Event() { delete static_cast<Marker*>(event_); }
void Event::record(Stream stream) {
  const std::lock_guard lock(mutex);
  require_well();
  Queue& queue = queue_of(stream);
  *static_cast<Marker*>(event_) = {queue.shared_from_this(),
                                   queue.done + static_cast<std::int64_t>(queue.work.size())};
}
void Event::hold(Stream stream) {
  const std::lock_guard lock(mutex);
  const Marker marker = *static_cast<Marker*>(event_);
  if (marker.queue == nullptr) return;
  put_work(queue_of(stream), {[marker] { run_until(*marker.queue, marker.at); }});
}
void Event::wait() {
  const std::lock_guard lock(mutex);
  require_well();
  const Marker& marker = *static_cast<Marker*>(event_);
  if (marker.queue == nullptr || marker.at <= marker.queue->done) return;
  ++counts().waits;
  run_until(*marker.queue, marker.at);
}

Graph::~Graph() { delete static_cast<std::vector<Work>*>(graph_); }
Graph::Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(graph_, other.graph_);
  return *this;
}
void Graph::launch(Stream stream) const {
  const std::lock_guard lock(mutex);
  ++counts().graph_launches;
  ++counts().calls;
  for (const Work& work : *static_cast<const std::vector<Work>*>(graph_)) {
    put_work(queue_of(stream), work);
  }
}

void begin_capture(Stream stream) {
  const std::lock_guard lock(mutex);
  require_well();
  queue_of(stream).capturing = true;
  queue_of(stream).captured.clear();
}
Graph end_capture(Stream stream) {
  const std::lock_guard lock(mutex);
  require_well();
  ++counts().captures;
  Queue& queue = queue_of(stream);
  queue.capturing = false;
  Graph graph;
  graph.graph_ = new std::vector<Work>(std::move(queue.captured));
  queue.captured.clear();
  return graph;
}
void abandon_capture(Stream stream) noexcept {
  const std::lock_guard lock(mutex);
  queue_of(stream).capturing = false;
  queue_of(stream).captured.clear();
}

void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex);
  if (bytes == 0) return;
  if (!memory().holds(to, bytes) || memory().near(from)) {
    throw InternalError("[cuda] copy: expected host memory into device memory, got others");
  }
  ++counts().to_device;
  put_work(queue_of(stream), {[=] { std::memcpy(to, from, bytes); }});
}

void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex);
  if (bytes == 0) return;
  if (!memory().holds(from, bytes) || memory().near(to)) {
    throw InternalError("[cuda] copy: expected device memory into host memory, got others");
  }
  ++counts().to_host;
  put_work(queue_of(stream), {[=] { std::memcpy(to, from, bytes); }});
}

void fill(void* to, int byte, std::size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex);
  if (!memory().holds(to, bytes)) {
    throw InternalError("[cuda] fill: expected device memory, got other");
  }
  put_work(queue_of(stream), {[=] { std::memset(to, byte, bytes); }});
}

void synchronize(Stream stream) {
  const std::lock_guard lock(mutex);
  require_well();
  ++counts().waits;
  Queue& queue = queue_of(stream);
  if (queue.capturing) {
    throw DeviceError("[cuda] a kernel: operation not permitted when stream is capturing", true);
  }
  run_until(queue, queue.done + static_cast<std::int64_t>(queue.work.size()));
}

}  // namespace cuda
}  // namespace specrt
