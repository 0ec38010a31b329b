#include "memory.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace cuda_test {
namespace {

enum class Kind : std::uint32_t { host, exact, arena };

// In front of what operator new returns, which is aligned to 32 bytes with it.
struct alignas(32) Header {
  Kind kind;
  std::uint32_t level;  // of the arena's blocks: 1 << level bytes
  std::size_t size;
};
static_assert(sizeof(Header) == 32);

constexpr std::size_t kArenaBytes = std::size_t{1} << 30;
constexpr std::size_t kGuard = 32;
constexpr std::uint32_t kLevels = 31;

Kind kind = Kind::host;
std::byte* arena = nullptr;
std::size_t arena_used = 0;
std::size_t damaged = 0;
std::byte* free_blocks[kLevels] = {};  // of each level, linked through their first word

void* pinned(std::size_t bytes) {
  void* memory = nullptr;
  constexpr unsigned kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
  if (cudaHostAlloc(&memory, bytes, kFlags) != cudaSuccess) throw std::bad_alloc();
  return memory;
}

// [guard][header][the allocation][guard and what is left of the block]
std::byte* arena_block(std::uint32_t level) {
  if (std::byte* block = free_blocks[level]; block != nullptr) {
    std::memcpy(&free_blocks[level], block, sizeof block);
    return block;
  }
  const std::size_t bytes = std::size_t{1} << level;
  if (kArenaBytes - arena_used < bytes) throw std::bad_alloc();
  std::byte* block = arena + arena_used;
  arena_used += bytes;
  return block;
}

bool untouched(const std::byte* from, const std::byte* to) {
  for (; from < to; ++from) {
    if (*from != std::byte{0xFF}) return false;
  }
  return true;
}

void* allocate(std::size_t size) {
  Header header{kind, 0, size};
  std::byte* at = nullptr;
  if (kind == Kind::arena) {
    header.level =
        static_cast<std::uint32_t>(std::bit_width(size + sizeof(Header) + 2 * kGuard - 1));
    if (header.level >= kLevels) throw std::bad_alloc();
    std::byte* block = arena_block(header.level);
    std::memset(block, 0xFF, std::size_t{1} << header.level);
    at = block + kGuard;
  } else if (kind == Kind::exact) {
    at = static_cast<std::byte*>(pinned(size + sizeof(Header)));
  } else {
    at = static_cast<std::byte*>(std::aligned_alloc(
        alignof(Header), (size + 2 * sizeof(Header) - 1) / sizeof(Header) * sizeof(Header)));
    if (at == nullptr) throw std::bad_alloc();
  }
  std::memcpy(at, &header, sizeof header);
  return at + sizeof(Header);
}

void release(void* memory) {
  if (memory == nullptr) return;
  std::byte* at = static_cast<std::byte*>(memory) - sizeof(Header);
  Header header;
  std::memcpy(&header, at, sizeof header);
  if (header.kind == Kind::host) {
    std::free(at);
  } else if (header.kind == Kind::exact) {
    (void)cudaFreeHost(at);
  } else {
    std::byte* block = at - kGuard;
    const std::byte* end = block + (std::size_t{1} << header.level);
    if (!untouched(block, at) || !untouched(static_cast<std::byte*>(memory) + header.size, end)) {
      ++damaged;
      std::fprintf(stderr, "written beyond an allocation of %zu bytes\n", header.size);
    }
    std::memcpy(block, &free_blocks[header.level], sizeof block);
    free_blocks[header.level] = block;
  }
}

}  // namespace

void share_memory(bool exact) {
  if (!exact && arena == nullptr) arena = static_cast<std::byte*>(pinned(kArenaBytes));
  kind = exact ? Kind::exact : Kind::arena;
}

std::size_t overruns() { return damaged; }

}  // namespace cuda_test

// The tests have one thread.
void* operator new(std::size_t size) { return cuda_test::allocate(size); }
void* operator new[](std::size_t size) { return cuda_test::allocate(size); }
void operator delete(void* memory) noexcept { cuda_test::release(memory); }
void operator delete[](void* memory) noexcept { cuda_test::release(memory); }
void operator delete(void* memory, std::size_t) noexcept { cuda_test::release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { cuda_test::release(memory); }
