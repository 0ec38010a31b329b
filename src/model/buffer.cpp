#include "model/buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "specrt/error.h"

namespace specrt {

Buffer::~Buffer() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Buffer Buffer::allocate(std::int64_t bytes, const std::string& what) {
  Buffer buffer;
  if (bytes <= 0) return buffer;
  void* memory = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw CapacityError(
        expected_got(what, std::to_string(bytes) + " bytes of memory", std::strerror(errno)));
  }
  // Streaming weights through 4 KiB pages costs a TLB miss every page; a refusal changes nothing.
  (void)::madvise(memory, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.size_ = bytes;
  return buffer;
}

Buffer Buffer::map_file(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    throw LoadError(expected_got(path, "a readable file", std::strerror(errno)));
  }
  struct stat status{};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) {
    ::close(file);
    throw LoadError(expected_got(path, "a regular file that is not empty", "something else"));
  }
  void* memory =
      ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  if (memory == MAP_FAILED) {
    throw LoadError(expected_got(path, "a file that can be mapped", std::strerror(error)));
  }
  Buffer buffer;
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.size_ = status.st_size;
  return buffer;
}

}  // namespace specrt
