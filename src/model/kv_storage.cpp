#include "model/kv_storage.h"

#include <algorithm>
#include <cstring>

namespace specrt {

KvStorage::KvStorage(const KvLayout& layout)
    : layout_(layout), buffer_(Buffer::allocate(layout.bytes(), "kv cache")) {
  std::byte* at = buffer_.data();
  // Wide elements first, so that each plane is aligned to its own.
  for (const KvDType dtype : {KvDType::f32, KvDType::bf16, KvDType::i8}) {
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

}  // namespace specrt
