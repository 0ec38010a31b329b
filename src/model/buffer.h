#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace specrt {

/// Page-aligned memory that starts as zeros and costs nothing until touched, or a read-only file
/// mapping.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Throws CapacityError naming `what` and the bytes.
  static Buffer allocate(std::int64_t bytes, const std::string& what);
  /// Throws LoadError.
  static Buffer map_file(const std::string& path);

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace specrt
