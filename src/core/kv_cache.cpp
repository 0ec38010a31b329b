#include "core/kv_cache.h"

#include <algorithm>
#include <string>

#include "specrt/error.h"

// Sequences: how they come, grow, are cut and go. kv_promises.cpp reckons what they are owed,
// kv_prefix.cpp shares beginnings, kv_check.cpp proves that the books agree.

namespace specrt {

KvCache::KvCache(const KvLayout& layout) : layout_(layout) {
  layout_.check();
  for (const KvGroup& group : layout_.groups) pools_.emplace_back(group.num_blocks);
  set_aside_.assign(pools_.size(), 0);
}

const KvCache::Sequence& KvCache::find(SequenceId id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) {
    throw InvalidArgument(expected_got("sequence", "an id in the cache", std::to_string(id)));
  }
  return found->second;
}

KvCache::Sequence& KvCache::find(SequenceId id) {
  return const_cast<Sequence&>(static_cast<const KvCache*>(this)->find(id));
}

std::int64_t KvCache::blocks_for(std::int64_t positions) const {
  return (positions + layout_.block_size - 1) / layout_.block_size;
}

// The first position that a query sees: it stands at `position` itself, which is its last.
std::int64_t KvCache::first_seen(std::size_t group, std::int64_t position) const {
  const std::int64_t window = layout_.groups[group].window;
  return window == 0 ? 0 : std::max<std::int64_t>(0, position - window + 1);
}

bool KvCache::can_add(std::int64_t reserved_length) const {
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    if (layout_.blocks_of(g, reserved_length) > room(g)) return false;
  }
  return true;
}

bool KvCache::fits(std::int64_t reserved_length) const {
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    if (layout_.blocks_of(g, reserved_length) > layout_.groups[g].num_blocks) return false;
  }
  return true;
}

KvCache::Sequence& KvCache::enter(SequenceId id, std::int64_t reserved_length) {
  if (contains(id)) {
    throw InvalidArgument(expected_got("sequence", "a new id", std::to_string(id)));
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int64_t blocks = layout_.blocks_of(g, reserved_length);
    if (blocks > room(g)) {
      throw CapacityError(expected_got("kv cache", std::to_string(blocks) + " blocks available",
                                       std::to_string(room(g))));
    }
  }
  Sequence sequence;
  sequence.parts.resize(pools_.size());
  sequence.reserved_entries = blocks_for(reserved_length);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    sequence.parts[g].reserved = layout_.blocks_of(g, reserved_length);
    sequence.parts[g].table.reserve(static_cast<std::size_t>(sequence.reserved_entries));
    set_aside_[g] += owed(sequence, g);
  }
  return sequences_.emplace(id, std::move(sequence)).first->second;
}

void KvCache::add(SequenceId id, std::int64_t reserved_length) { enter(id, reserved_length); }

void KvCache::fork(SequenceId parent, SequenceId child, std::int64_t reserved_length) {
  if (contains(child)) {
    throw InvalidArgument(expected_got("sequence", "a new id", std::to_string(child)));
  }
  const Sequence& source = find(parent);
  Sequence copy = source;
  const std::int64_t length = std::max(reserved_length, source.length);
  copy.reserved_entries = blocks_for(length);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Part& part = copy.parts[g];
    // Blocks past the committed length hold nothing that could be shared.
    part.table.resize(static_cast<std::size_t>(blocks_for(source.length)));
    part.owned = 0;
    const std::int64_t held = static_cast<std::int64_t>(part.table.size()) - part.holes;
    part.reserved = std::max(layout_.blocks_of(g, length), held);
    Standing own = standing(copy, g);
    std::int64_t need = 0;
    if (!own.windowed && source.length % layout_.block_size != 0) {
      // Each of the sharers may have to copy the partial block; the parent counts from now on.
      own.copies = true;
      if (!writes_shared(source, g, source.length)) need = 1;
    }
    need += own.owed();
    if (need > room(g)) {
      throw CapacityError(expected_got("kv cache", std::to_string(need) + " blocks available",
                                       std::to_string(room(g))));
    }
  }
  {
    const Renewed renewed(*this, source);
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      for (const std::int32_t block : copy.parts[g].table) {
        if (block >= 0) hold(child, copy, g, block);
      }
    }
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) set_aside_[g] += owed(copy, g);
  prefixes_.stand(copy.prefix_node, 1);
  sequences_.emplace(child, std::move(copy));
}

void KvCache::remove(SequenceId id) {
  const Sequence& sequence = find(id);
  cut(id, 0);
  for (std::size_t g = 0; g < pools_.size(); ++g) set_aside_[g] -= owed(sequence, g);
  sequences_.erase(id);
}

std::int64_t KvCache::length(SequenceId id) const { return find(id).length; }

std::span<const std::int32_t> KvCache::table(SequenceId id, std::int64_t group) const {
  return find(id).parts[static_cast<std::size_t>(group)].table;
}

std::int32_t KvCache::slot(SequenceId id, std::int64_t group, std::int64_t position) const {
  const auto& table = find(id).parts[static_cast<std::size_t>(group)].table;
  const std::int32_t block = table[static_cast<std::size_t>(position / layout_.block_size)];
  return static_cast<std::int32_t>(block * layout_.block_size + position % layout_.block_size);
}

std::int32_t KvCache::scratch_slot(std::int64_t group, std::int64_t index) const {
  const KvGroup& spec = layout_.groups[static_cast<std::size_t>(group)];
  return static_cast<std::int32_t>(spec.num_blocks * layout_.block_size + index);
}

void KvCache::prepare(SequenceId id, std::int64_t new_length, std::vector<Move>& moves) {
  Sequence& sequence = find(id);
  if (new_length <= sequence.length) return;
  check_prepare(id, sequence, new_length);
  const Renewed renewed(*this, sequence);
  const std::int64_t want = blocks_for(new_length);
  const auto last = static_cast<std::size_t>(sequence.length / layout_.block_size);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    auto& table = sequence.parts[g].table;
    if (writes_shared(sequence, g, sequence.length)) {
      const std::int32_t old = table[last];
      const std::int32_t fresh = take(id, sequence, g);
      moves.push_back({group, static_cast<std::int32_t>(old * layout_.block_size),
                       static_cast<std::int32_t>(fresh * layout_.block_size),
                       static_cast<std::int32_t>(sequence.length % layout_.block_size)});
      table[last] = fresh;
      let_go(id, sequence, g, last, old);
    }
    while (static_cast<std::int64_t>(table.size()) < want) {
      table.push_back(take(id, sequence, g));
    }
  }
  sequence.reserved_entries = std::max(sequence.reserved_entries, want);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Part& part = sequence.parts[g];
    const std::int64_t held = static_cast<std::int64_t>(part.table.size()) - part.holes;
    part.reserved =
        std::max({part.reserved,
                  layout_.blocks_of(g, sequence.reserved_entries * layout_.block_size), held});
  }
}

void KvCache::advance(SequenceId id, std::int64_t new_length, std::int64_t held,
                      std::span<const TokenId> tokens) {
  Sequence& sequence = find(id);
  for (const Part& part : sequence.parts) {
    if (new_length < sequence.length ||
        blocks_for(new_length) > static_cast<std::int64_t>(part.table.size())) {
      throw InternalError(expected_got(
          "advance", "a prepared length from " + std::to_string(sequence.length) + " on",
          std::to_string(new_length)));
    }
  }
  const Renewed renewed(*this, sequence);
  sequence.length = new_length;
  if (!tokens.empty()) remember_blocks(id, sequence, tokens);
  slide(id, sequence, std::min(new_length, held));
}

// Lets go of the blocks that no query at `next` or behind it sees.
void KvCache::slide(SequenceId id, Sequence& sequence, std::int64_t next) {
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Part& part = sequence.parts[g];
    const std::int64_t gone = first_seen(g, next) / layout_.block_size;
    while (part.holes < gone) {
      const auto b = static_cast<std::size_t>(part.holes);
      const std::int32_t block = part.table[b];
      part.table[b] = -1;
      ++part.holes;
      let_go(id, sequence, g, b, block);
    }
  }
}

void KvCache::commit(SequenceId id, std::span<const std::int32_t> path, std::vector<Move>& moves,
                     std::span<const TokenId> tokens) {
  if (path.empty()) return;
  const std::int64_t start = find(id).length;
  const std::int64_t end = start + static_cast<std::int64_t>(path.size());
  prepare(id, end, moves);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    for (std::size_t i = 0; i < path.size(); ++i) {
      moves.push_back({group, scratch_slot(group, path[i]),
                       slot(id, group, start + static_cast<std::int64_t>(i)), 1});
    }
  }
  advance(id, end, end, tokens);
}

void KvCache::truncate(SequenceId id, std::int64_t new_length) {
  const Sequence& sequence = find(id);
  if (new_length > sequence.length || new_length < 0) {
    throw InvalidArgument(expected_got("truncate",
                                       "a length in [0, " + std::to_string(sequence.length) + "]",
                                       std::to_string(new_length)));
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    if (new_length > 0 && new_length < sequence.length &&
        first_seen(g, new_length) / layout_.block_size < sequence.parts[g].holes) {
      throw InvalidArgument(expected_got("truncate", "a length whose window is still held",
                                         std::to_string(new_length)));
    }
  }
  // A cut inside a shared block owes a copy of it, and starting over behind a window owes the
  // blocks that have left it; others may have been promised all there is.
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int64_t more = short_after_cut(id, g, new_length);
    if (more > 0) {
      throw CapacityError(expected_got("kv cache", std::to_string(more) + " more free blocks",
                                       "all of them promised"));
    }
  }
  cut(id, new_length);
}

void KvCache::cut(SequenceId id, std::int64_t new_length) {
  Sequence& sequence = find(id);
  const Renewed renewed(*this, sequence);
  const std::int64_t keep = blocks_for(new_length);
  step_back(sequence, new_length / layout_.block_size);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Part& part = sequence.parts[g];
    // From the far end, so that of a beginning the far end is idle for longest and goes first.
    while (static_cast<std::int64_t>(part.table.size()) > keep) {
      const std::int32_t block = part.table.back();
      part.table.pop_back();
      if (block < 0) {
        --part.holes;
      } else {
        let_go(id, sequence, g, part.table.size(), block);
      }
    }
  }
  sequence.length = new_length;
  for (std::size_t g = 0; g < pools_.size(); ++g) forget_partial(sequence, g);
  // What advance() kept for this cut must not stand beside what the next pass adds.
  slide(id, sequence, new_length);
}

std::int64_t KvCache::available_blocks() const {
  std::int64_t fewest = INT64_MAX;
  for (std::size_t g = 0; g < pools_.size(); ++g) fewest = std::min(fewest, room(g));
  return std::max<std::int64_t>(0, fewest);
}

std::int64_t KvCache::used_blocks(std::int64_t group) const {
  return pools_[static_cast<std::size_t>(group)].held_blocks();
}

}  // namespace specrt
