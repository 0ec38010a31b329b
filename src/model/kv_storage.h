#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/kv_cache.h"
#include "model/buffer.h"

namespace specrt {

/// The memory behind a KvCache: one array a layer and plane.
class KvStorage {
 public:
  explicit KvStorage(const KvLayout& layout);

  /// [slots, heads, dim] of the plane's dtype.
  std::byte* plane(std::int64_t layer, std::int64_t plane) const {
    return planes_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(plane)];
  }
  /// In order; a later move may read what an earlier one wrote.
  void apply(std::span<const KvCache::Move> moves);
  /// Makes NaN of every slot that holds no committed or remembered position, so that whoever
  /// reads one shows it. `cache` is the bookkeeping of this memory, between two passes.
  void poison(const KvCache& cache);

 private:
  KvLayout layout_;
  Buffer buffer_;
  std::vector<std::vector<std::byte*>> planes_;  // by layer
};

}  // namespace specrt
