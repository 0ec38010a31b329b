#include <algorithm>
#include <string>

#include "core/kv_cache.h"
#include "specrt/error.h"

// What a cache's memory is divided into, and how large each part is.

namespace specrt {

std::int64_t KvGroup::bytes_per_slot() const {
  std::int64_t bytes = 0;
  for (const KvPlane& plane : planes) bytes += plane.bytes_per_slot();
  return bytes * static_cast<std::int64_t>(layers.size());
}

std::int64_t KvLayout::bytes_per_block() const {
  std::int64_t bytes = 0;
  for (const KvGroup& group : groups) bytes += group.bytes_per_slot();
  return bytes * block_size;
}

std::int64_t KvLayout::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const KvGroup& group : groups) bytes += group.bytes_per_slot();
  return bytes * scratch_slots;
}

std::int64_t KvLayout::bytes() const {
  std::int64_t bytes = scratch_bytes();
  for (const KvGroup& group : groups) {
    bytes += group.bytes_per_slot() * block_size * group.num_blocks;
  }
  return bytes;
}

std::int64_t KvLayout::blocks_of(std::size_t group, std::int64_t positions) const {
  const std::int64_t window = groups[group].window;
  const std::int64_t all = (positions + block_size - 1) / block_size;
  if (window == 0) return all;
  // The window, what one pass adds before anything is freed, and a block cut at each end.
  return std::min(all, (window + scratch_slots + block_size - 1) / block_size + 1);
}

void KvLayout::set_blocks(std::int64_t blocks, std::int64_t sequences, std::int64_t longest) {
  // More than every sequence at full length serves only what is kept of earlier ones.
  const std::int64_t kept = std::max<std::int64_t>(0, blocks - longest * sequences);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::int64_t most = blocks_of(g, std::min(blocks, longest) * block_size);
    groups[g].num_blocks = std::min(blocks - kept, most * sequences) + (prefix_reuse ? kept : 0);
  }
}

void KvLayout::check() const {
  if (block_size < 1) {
    throw InvalidArgument(expected_got("block_size", "at least 1", std::to_string(block_size)));
  }
  if (groups.empty()) throw InvalidArgument(expected_got("kv groups", "at least one", "none"));
  for (const KvGroup& group : groups) {
    if (group.num_blocks < 1) {
      throw CapacityError(expected_got("kv_cache_bytes", "room for at least one block",
                                       std::to_string(group.num_blocks) + " blocks"));
    }
    const std::int64_t slots = group.num_blocks * block_size + scratch_slots;
    if (slots > INT32_MAX) {
      throw InvalidArgument(
          expected_got("kv_cache_bytes", "at most 2^31 - 1 token slots", std::to_string(slots)));
    }
  }
}

}  // namespace specrt
