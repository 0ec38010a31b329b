#include "model/kv_storage.h"

#include <algorithm>
#include <cstring>

namespace specrt {

KvStorage::KvStorage(const KvLayout& layout)
    : layout_(layout), buffer_(Buffer::allocate(layout.bytes(), "kv cache")) {
  std::byte* at = buffer_.data();
  // Wide elements first, so that each plane is aligned to its own.
  for (const KvDType dtype : {KvDType::f32, KvDType::bf16, KvDType::f16, KvDType::i8}) {
    for (const KvGroup& group : layout_.groups) {
      const std::int64_t slots = group.num_blocks * layout_.block_size + layout_.scratch_slots;
      for (const std::int64_t layer : group.layers) {
        const auto l = static_cast<std::size_t>(layer);
        if (l >= planes_.size()) planes_.resize(l + 1);
        planes_[l].resize(group.planes.size());
        for (std::size_t p = 0; p < group.planes.size(); ++p) {
          if (group.planes[p].dtype != dtype) continue;
          planes_[l][p] = at;
          at += slots * group.planes[p].bytes_per_slot();
        }
      }
    }
  }
}

void KvStorage::apply(std::span<const KvCache::Move> moves) {
  for (const KvCache::Move& move : moves) {
    const KvGroup& group = layout_.groups[static_cast<std::size_t>(move.group)];
    for (const std::int64_t layer : group.layers) {
      for (std::size_t p = 0; p < group.planes.size(); ++p) {
        const std::int64_t slot = group.planes[p].bytes_per_slot();
        std::byte* base = plane(layer, static_cast<std::int64_t>(p));
        std::memmove(base + move.to * slot, base + move.from * slot,
                     static_cast<std::size_t>(move.count * slot));
      }
    }
  }
}

void KvStorage::poison(const KvCache& cache) {
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    const std::vector<bool> filled = cache.filled_slots(static_cast<std::int64_t>(g));
    for (std::int64_t slot = 0; slot < static_cast<std::int64_t>(filled.size()); ++slot) {
      if (filled[static_cast<std::size_t>(slot)]) continue;
      // All bits set is NaN in every floating-point format. Most slots are poisoned already, and a
      // pass writes all of a slot, so the first value of the first layer tells.
      const std::int64_t first = group.planes.front().bytes_per_slot();
      const std::byte* begin = plane(group.layers.front(), 0) + slot * first;
      if (std::all_of(begin, begin + std::min<std::int64_t>(first, 4),
                      [](std::byte one) { return one == std::byte{0xFF}; })) {
        continue;
      }
      for (const std::int64_t layer : group.layers) {
        for (std::size_t p = 0; p < group.planes.size(); ++p) {
          const std::int64_t bytes = group.planes[p].bytes_per_slot();
          std::memset(plane(layer, static_cast<std::int64_t>(p)) + slot * bytes, 0xFF,
                      static_cast<std::size_t>(bytes));
        }
      }
    }
  }
}

}  // namespace specrt
