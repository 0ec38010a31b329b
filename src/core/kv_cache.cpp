#include "core/kv_cache.h"

#include <algorithm>
#include <string>

#include "specrt/error.h"

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

bool KvLayout::has_window() const {
  return std::any_of(groups.begin(), groups.end(), [](const KvGroup& g) { return g.window > 0; });
}

void KvLayout::set_blocks(std::int64_t blocks, std::int64_t sequences) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::int64_t most = blocks_of(g, blocks * block_size);
    groups[g].num_blocks = std::min(blocks, most * sequences);
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

KvCache::KvCache(const KvLayout& layout) : layout_(layout) {
  layout_.check();
  // A block that leaves one sequence's window is not free while another shares it, so a promise of
  // room could not be kept: with windows nothing is shared.
  if (layout_.has_window()) layout_.prefix_reuse = false;
  pools_.resize(layout_.groups.size());
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int64_t blocks = layout_.groups[g].num_blocks;
    pools_[g].references.assign(static_cast<std::size_t>(blocks), 0);
    pools_[g].remembered.assign(static_cast<std::size_t>(blocks), false);
    pools_[g].free.reserve(static_cast<std::size_t>(blocks));
    // Popped from the back, so low blocks are used first and the pool's pages stay few.
    for (std::int64_t b = blocks - 1; b >= 0; --b) {
      pools_[g].free.push_back(static_cast<std::int32_t>(b));
    }
  }
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

// Blocks that this sequence was promised and has not taken. Shared blocks count as not taken: a
// write to one takes a fresh block, and only the partial last one can be written.
std::int64_t KvCache::owed(const Sequence& sequence, std::int64_t group) const {
  const auto& table = sequence.tables[static_cast<std::size_t>(group)];
  return owed_with(sequence, group, table.size(), sequence.length);
}

// The same, had the table `blocks` entries and the sequence this length.
std::int64_t KvCache::owed_with(const Sequence& sequence, std::int64_t group, std::size_t blocks,
                                std::int64_t length) const {
  const auto g = static_cast<std::size_t>(group);
  const auto& table = sequence.tables[g];
  auto entries = static_cast<std::int64_t>(blocks);
  std::int64_t held = entries - std::min(entries, sequence.holes[g]);
  if (blocks > 0 && length % layout_.block_size != 0) {
    const std::int32_t last = table[static_cast<std::size_t>(length / layout_.block_size)];
    if (last >= 0 && pools_[g].references[static_cast<std::size_t>(last)] > 1) {
      --entries;
      --held;
    }
  }
  // What it takes to the end, and of that no more than it ever holds at once.
  return std::max<std::int64_t>(
      0, std::min(sequence.reserved[g] - held, sequence.reserved_entries - entries));
}

// Blocks that may still be promised or taken without a promise.
std::int64_t KvCache::room(std::size_t group) const {
  const Pool& pool = pools_[group];
  return static_cast<std::int64_t>(pool.free.size()) + pool.idle - pool.set_aside;
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
  sequence.tables.resize(pools_.size());
  sequence.holes.resize(pools_.size());
  sequence.reserved_entries = blocks_for(reserved_length);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    sequence.reserved.push_back(layout_.blocks_of(g, reserved_length));
    sequence.tables[g].reserve(static_cast<std::size_t>(blocks_for(reserved_length)));
    pools_[g].set_aside += sequence.reserved[g];
  }
  return sequences_.emplace(id, std::move(sequence)).first->second;
}

void KvCache::add(SequenceId id, std::int64_t reserved_length) { enter(id, reserved_length); }

std::int64_t KvCache::add(SequenceId id, std::int64_t reserved_length,
                          std::span<const TokenId> prompt) {
  Sequence& sequence = enter(id, reserved_length);
  if (!layout_.prefix_reuse || prompt.empty()) return 0;
  const auto size = static_cast<std::size_t>(layout_.block_size);
  const std::size_t most = (prompt.size() - 1) / size;
  for (std::size_t b = 0; b < most; ++b) {
    const std::int64_t next = prefixes_.find(sequence.prefix_node, prompt.subspan(b * size, size));
    if (next == PrefixIndex::kNone) break;
    prefixes_.touch(next);
    const PrefixIndex::Node& node = prefixes_.node(next);
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      const auto group = static_cast<std::int64_t>(g);
      const std::int64_t before = owed(sequence, group);
      hold(g, node.blocks[g]);
      sequence.tables[g].push_back(node.blocks[g]);
      refresh_set_aside(sequence, group, before);
    }
    sequence.prefix_node = next;
    ++sequence.remembered;
    advance(id, sequence.remembered * layout_.block_size);
  }
  return sequence.length;
}

void KvCache::remember(SequenceId id, std::span<const TokenId> tokens) {
  if (!layout_.prefix_reuse) return;
  Sequence& sequence = find(id);
  const auto size = static_cast<std::size_t>(layout_.block_size);
  while (static_cast<std::size_t>(sequence.remembered + 1) * size <=
             static_cast<std::size_t>(sequence.length) &&
         prefixes_.contains(sequence.prefix_node)) {
    const auto b = static_cast<std::size_t>(sequence.remembered);
    const auto own = tokens.subspan(b * size, size);
    std::int64_t next = prefixes_.find(sequence.prefix_node, own);
    if (next == PrefixIndex::kNone) {
      std::vector<std::int32_t> blocks;
      for (const auto& table : sequence.tables) blocks.push_back(table[b]);
      // A block that has left its window before it could be remembered ends the chain here.
      if (std::find(blocks.begin(), blocks.end(), -1) != blocks.end()) return;
      next = prefixes_.insert(sequence.prefix_node, own, blocks);
      for (std::size_t g = 0; g < pools_.size(); ++g) {
        hold(g, blocks[g]);
        pools_[g].remembered[static_cast<std::size_t>(blocks[g])] = true;
      }
    } else {
      prefixes_.touch(next);
    }
    sequence.prefix_node = next;
    ++sequence.remembered;
  }
}

std::int64_t KvCache::remembered_blocks() const {
  std::int64_t fewest = INT64_MAX;
  for (const Pool& pool : pools_) fewest = std::min(fewest, pool.idle);
  return fewest;
}

void KvCache::hold(std::size_t group, std::int32_t block) {
  Pool& pool = pools_[group];
  std::int32_t& references = pool.references[static_cast<std::size_t>(block)];
  if (references == 1 && pool.remembered[static_cast<std::size_t>(block)]) --pool.idle;
  ++references;
}

// Drops a node of the prefix index and all below it. Sequences that share its blocks keep them.
void KvCache::forget(std::int64_t node) {
  prefixes_.erase(node, [&](const PrefixIndex::Node& gone) {
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      Pool& pool = pools_[g];
      const auto block = static_cast<std::size_t>(gone.blocks[g]);
      pool.remembered[block] = false;
      if (--pool.references[block] == 0) {
        --pool.idle;
        pool.free.push_back(gone.blocks[g]);
      }
    }
  });
}

void KvCache::fork(SequenceId parent, SequenceId child, std::int64_t reserved_length) {
  if (layout_.has_window()) {
    throw UnsupportedError("[fork] expected a cache without windowed groups, got one with");
  }
  if (contains(child)) {
    throw InvalidArgument(expected_got("sequence", "a new id", std::to_string(child)));
  }
  const Sequence& source = find(parent);
  Sequence copy = source;
  const bool partial = source.length % layout_.block_size != 0;
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    // Blocks past the committed length hold nothing that could be shared.
    auto& table = copy.tables[g];
    table.resize(static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(table.size()), blocks_for(copy.length))));
    const std::int64_t held = static_cast<std::int64_t>(table.size()) - copy.holes[g];
    copy.reserved_entries = blocks_for(std::max(reserved_length, source.length));
    copy.reserved[g] =
        std::max(layout_.blocks_of(g, std::max(reserved_length, source.length)), held);
    // Both may have to copy the shared partial block, so each is owed one more for it.
    const std::int64_t need =
        std::min(copy.reserved[g] - held,
                 copy.reserved_entries - static_cast<std::int64_t>(table.size())) +
        (partial ? 2 : 0);
    if (need > room(g)) {
      throw CapacityError(expected_got("kv cache", std::to_string(need) + " blocks available",
                                       std::to_string(room(g))));
    }
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    Sequence& original = find(parent);
    const std::int64_t before = owed(original, group);
    for (const std::int32_t block : copy.tables[g]) {
      if (block >= 0) hold(g, block);
    }
    pools_[g].set_aside += owed(original, group) - before + owed(copy, group);
  }
  sequences_.emplace(child, std::move(copy));
}

void KvCache::remove(SequenceId id) {
  Sequence& sequence = find(id);
  cut(id, 0);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    pools_[g].set_aside -= owed(sequence, static_cast<std::int64_t>(g));
  }
  sequences_.erase(id);
}

std::int64_t KvCache::length(SequenceId id) const { return find(id).length; }

std::span<const std::int32_t> KvCache::table(SequenceId id, std::int64_t group) const {
  return find(id).tables[static_cast<std::size_t>(group)];
}

std::int32_t KvCache::slot(SequenceId id, std::int64_t group, std::int64_t position) const {
  const auto& table = find(id).tables[static_cast<std::size_t>(group)];
  const std::int32_t block = table[static_cast<std::size_t>(position / layout_.block_size)];
  return static_cast<std::int32_t>(block * layout_.block_size + position % layout_.block_size);
}

std::int32_t KvCache::scratch_slot(std::int64_t group, std::int64_t index) const {
  const KvGroup& spec = layout_.groups[static_cast<std::size_t>(group)];
  return static_cast<std::int32_t>(spec.num_blocks * layout_.block_size + index);
}

std::int32_t KvCache::take(std::int64_t group) {
  const auto g = static_cast<std::size_t>(group);
  Pool& pool = pools_[g];
  if (pool.free.empty()) {
    // From the far end of the least recently used: a node takes all below it along. An idle node
    // whose children are all in use goes only where there is no other.
    const auto idle = [&](const PrefixIndex::Node& node) {
      return pool.references[static_cast<std::size_t>(node.blocks[g])] == 1;
    };
    std::int64_t node = prefixes_.oldest(
        [&](const PrefixIndex::Node& one) { return one.children.empty() && idle(one); });
    if (node == PrefixIndex::kNone) node = prefixes_.oldest(idle);
    forget(node);
  }
  const std::int32_t block = pool.free.back();
  pool.free.pop_back();
  pool.references[static_cast<std::size_t>(block)] = 1;
  return block;
}

// Whom sequence `id` shares a block with, where that is one sequence.
KvCache::Sequence* KvCache::sole_other(SequenceId id, std::int64_t group, std::size_t index,
                                       std::int32_t block) {
  const auto g = static_cast<std::size_t>(group);
  if (pools_[g].references[static_cast<std::size_t>(block)] != 2) return nullptr;
  for (auto& [other_id, candidate] : sequences_) {
    const auto& table = candidate.tables[g];
    if (other_id != id && index < table.size() && table[index] == block) return &candidate;
  }
  return nullptr;
}

// Sequence `id` gives up entry `index` of its table. Whoever is left alone with a partial block
// that it shared no longer owes itself a copy, so its promise shrinks.
void KvCache::drop(SequenceId id, std::int64_t group, std::size_t index, std::int32_t block) {
  if (block < 0) return;
  const auto g = static_cast<std::size_t>(group);
  Pool& pool = pools_[g];
  std::int32_t& references = pool.references[static_cast<std::size_t>(block)];
  if (references == 1) {
    references = 0;
    pool.free.push_back(block);
    return;
  }
  Sequence* other = sole_other(id, group, index, block);
  const std::int64_t before = other != nullptr ? owed(*other, group) : 0;
  --references;
  if (references == 1 && pool.remembered[static_cast<std::size_t>(block)]) ++pool.idle;
  if (other != nullptr) refresh_set_aside(*other, group, before);
}

void KvCache::refresh_set_aside(Sequence& sequence, std::int64_t group, std::int64_t owed_before) {
  pools_[static_cast<std::size_t>(group)].set_aside += owed(sequence, group) - owed_before;
}

void KvCache::prepare(SequenceId id, std::int64_t new_length, std::vector<Move>& moves) {
  Sequence& sequence = find(id);
  if (new_length <= sequence.length) return;
  const std::int64_t want = blocks_for(new_length);
  const bool partial = sequence.length % layout_.block_size != 0;
  const auto last = static_cast<std::size_t>(sequence.length / layout_.block_size);

  const auto shared = [&](std::size_t g) {
    const auto& table = sequence.tables[g];
    return partial && table[last] >= 0 &&
           pools_[g].references[static_cast<std::size_t>(table[last])] > 1;
  };
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int64_t need =
        std::max<std::int64_t>(0, want - static_cast<std::int64_t>(sequence.tables[g].size())) +
        (shared(g) ? 1 : 0);
    const std::int64_t own_room = room(g) + owed(sequence, static_cast<std::int64_t>(g));
    if (need > own_room) {
      throw CapacityError(expected_got("kv cache", std::to_string(need) + " free blocks",
                                       std::to_string(own_room)));
    }
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    auto& table = sequence.tables[g];
    const std::int64_t before = owed(sequence, group);
    if (shared(g)) {
      const std::int32_t old = table[last];
      const std::int32_t fresh = take(group);
      moves.push_back({group, static_cast<std::int32_t>(old * layout_.block_size),
                       static_cast<std::int32_t>(fresh * layout_.block_size),
                       static_cast<std::int32_t>(sequence.length % layout_.block_size)});
      table[last] = fresh;
      drop(id, group, last, old);
    }
    while (static_cast<std::int64_t>(table.size()) < want) table.push_back(take(group));
    refresh_set_aside(sequence, group, before);
  }
}

void KvCache::advance(SequenceId id, std::int64_t new_length, std::int64_t held) {
  Sequence& sequence = find(id);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    if (new_length < sequence.length ||
        blocks_for(new_length) > static_cast<std::int64_t>(sequence.tables[g].size())) {
      throw InternalError(expected_got(
          "advance", "a prepared length from " + std::to_string(sequence.length) + " on",
          std::to_string(new_length)));
    }
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    const std::int64_t before = owed(sequence, group);
    const std::int64_t window = layout_.groups[g].window;
    if (window > 0) {
      // The next query sits at `next` at the earliest and sees (next - window, next].
      const std::int64_t next = std::min(new_length, held);
      const std::int64_t gone = std::max<std::int64_t>(0, next - window + 1);
      auto& table = sequence.tables[g];
      for (std::int64_t b = gone / layout_.block_size - 1; b >= 0; --b) {
        auto& entry = table[static_cast<std::size_t>(b)];
        if (entry < 0) break;
        const std::int32_t block = entry;
        entry = -1;
        ++sequence.holes[g];
        drop(id, group, static_cast<std::size_t>(b), block);
      }
    }
    const std::int64_t old_length = sequence.length;
    sequence.length = new_length;
    refresh_set_aside(sequence, group, before);
    sequence.length = old_length;
  }
  sequence.length = new_length;
}

void KvCache::commit(SequenceId id, std::span<const std::int32_t> path, std::vector<Move>& moves) {
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
  advance(id, end);
}

void KvCache::truncate(SequenceId id, std::int64_t new_length) {
  Sequence& sequence = find(id);
  if (new_length > sequence.length || new_length < 0) {
    throw InvalidArgument(expected_got("truncate",
                                       "a length in [0, " + std::to_string(sequence.length) + "]",
                                       std::to_string(new_length)));
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    if (layout_.groups[g].window > 0 && new_length > 0 && new_length < sequence.length) {
      const auto& table = sequence.tables[g];
      const std::int64_t first =
          std::max<std::int64_t>(0, new_length - layout_.groups[g].window + 1) / layout_.block_size;
      if (table[static_cast<std::size_t>(first)] < 0) {
        throw InvalidArgument(expected_got("truncate", "a length whose window is still held",
                                           std::to_string(new_length)));
      }
    }
  }
  // A cut inside a shared block owes a copy of it, and starting over behind a window owes the
  // blocks that have left it; others may have been promised all there is.
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int64_t more = short_after_cut(id, static_cast<std::int64_t>(g), new_length);
    if (more > 0) {
      throw CapacityError(expected_got("kv cache", std::to_string(more) + " more free blocks",
                                       "all of them promised"));
    }
  }
  cut(id, new_length);
}

// By how many blocks promises would exceed what can be had after the cut.
std::int64_t KvCache::short_after_cut(SequenceId id, std::int64_t group, std::int64_t new_length) {
  const Sequence& sequence = find(id);
  const auto g = static_cast<std::size_t>(group);
  const Pool& pool = pools_[g];
  const auto& table = sequence.tables[g];
  const auto keep = std::min(table.size(), static_cast<std::size_t>(blocks_for(new_length)));
  std::int64_t promised =
      pool.set_aside - owed(sequence, group) + owed_with(sequence, group, keep, new_length);
  std::int64_t to_be_had = static_cast<std::int64_t>(pool.free.size()) + pool.idle;
  for (std::size_t i = keep; i < table.size(); ++i) {
    if (table[i] < 0) continue;
    const auto block = static_cast<std::size_t>(table[i]);
    const std::int32_t others = pool.references[block] - 1 - (pool.remembered[block] ? 1 : 0);
    if (others == 0) ++to_be_had;  // free at once, or remembered by nobody but the prefix index
    // Whoever is left alone with its partial block owes itself one less.
    const Sequence* other = sole_other(id, group, i, table[i]);
    if (other != nullptr && other->length % layout_.block_size != 0 &&
        other->length / layout_.block_size == static_cast<std::int64_t>(i) &&
        owed(*other, group) > 0) {
      --promised;
    }
  }
  return promised - to_be_had;
}

void KvCache::cut(SequenceId id, std::int64_t new_length) {
  Sequence& sequence = find(id);
  const std::int64_t keep = blocks_for(new_length);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const auto group = static_cast<std::int64_t>(g);
    auto& table = sequence.tables[g];
    const std::int64_t before = owed(sequence, group);
    while (static_cast<std::int64_t>(table.size()) > keep) {
      const std::int32_t block = table.back();
      table.pop_back();
      if (block < 0) --sequence.holes[g];
      drop(id, group, table.size(), block);
    }
    const std::int64_t old_length = sequence.length;
    sequence.length = new_length;
    refresh_set_aside(sequence, group, before);
    sequence.length = old_length;
  }
  sequence.length = new_length;
}

std::int64_t KvCache::available_blocks() const {
  std::int64_t fewest = INT64_MAX;
  for (std::size_t g = 0; g < pools_.size(); ++g) fewest = std::min(fewest, room(g));
  return std::max<std::int64_t>(0, fewest);
}

std::int64_t KvCache::used_blocks(std::int64_t group) const {
  const Pool& pool = pools_[static_cast<std::size_t>(group)];
  return static_cast<std::int64_t>(pool.references.size() - pool.free.size()) - pool.idle;
}

void KvCache::check_invariants() const {
  const auto fail = [](const std::string& what) {
    throw InternalError("[kv cache] broken invariant: " + what);
  };
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const Pool& pool = pools_[g];
    std::vector<std::int32_t> seen(pool.references.size(), 0);
    std::int64_t set_aside = 0;
    std::int64_t idle = 0;
    for (const auto& [id, node] : prefixes_.nodes()) {
      const auto block = static_cast<std::size_t>(node.blocks[g]);
      ++seen[block];
      if (!pool.remembered[block]) fail("the prefix index holds a block unknown to its pool");
      if (pool.references[block] == 1) ++idle;
    }
    if (idle != pool.idle) fail("the count of idle remembered blocks is off");
    for (const auto& [id, sequence] : sequences_) {
      const auto& table = sequence.tables[g];
      set_aside += owed(sequence, static_cast<std::int64_t>(g));
      if (blocks_for(sequence.length) > static_cast<std::int64_t>(table.size())) {
        fail("sequence " + std::to_string(id) + " is longer than its table");
      }
      if (std::count(table.begin(), table.end(), -1) != sequence.holes[g]) fail("holes miscounted");
      for (const std::int32_t block : table) {
        if (block < -1 || block >= static_cast<std::int32_t>(seen.size())) {
          fail("a table of sequence " + std::to_string(id) + " names block " +
               std::to_string(block));
        }
        if (block == -1 && layout_.groups[g].window == 0) fail("a hole without a window");
        if (block >= 0) ++seen[static_cast<std::size_t>(block)];
      }
    }
    std::vector<bool> is_free(pool.references.size(), false);
    for (const std::int32_t block : pool.free) {
      if (is_free[static_cast<std::size_t>(block)]) fail("a block is free twice");
      is_free[static_cast<std::size_t>(block)] = true;
    }
    for (std::size_t b = 0; b < seen.size(); ++b) {
      if (seen[b] != pool.references[b]) {
        fail("block " + std::to_string(b) + " is in " + std::to_string(seen[b]) +
             " tables and prefixes and counts " + std::to_string(pool.references[b]));
      }
      if (is_free[b] != (seen[b] == 0)) fail("block " + std::to_string(b) + " is lost");
    }
    if (set_aside != pool.set_aside) {
      fail("set aside " + std::to_string(pool.set_aside) + ", owed " + std::to_string(set_aside));
    }
    if (pool.set_aside > static_cast<std::int64_t>(pool.free.size()) + pool.idle) {
      fail("more promised than free");
    }
  }
}

}  // namespace specrt
