#include <algorithm>
#include <utility>

#include "core/kv_cache.h"
#include "specrt/error.h"

// Sharing beginnings. The prefix index knows full blocks by their tokens; a group with a window may
// have lost some of them while others remain, so a node's blocks are forgotten one by one there.
// Without a window a block is of no use when one before it is gone: a node goes as a whole there,
// with all below it.
//
// In every group, entry b of a table is the block of the b-th node on the way to where the sequence
// stands, or has left the window. So a node that somebody stands at or below is never idle in a
// group without a window, and the far end of a beginning is idle before what comes before it.

namespace specrt {

std::int64_t KvCache::add(SequenceId id, std::int64_t reserved_length,
                          std::span<const TokenId> prompt) {
  Sequence& sequence = enter(id, reserved_length);
  if (!layout_.prefix_reuse || prompt.empty()) return 0;
  const auto size = static_cast<std::size_t>(layout_.block_size);
  const std::size_t most =
      std::min((prompt.size() - 1) / size, static_cast<std::size_t>(sequence.reserved_entries));
  // The longest chain that a query behind it can do with: `unbroken` is for how many blocks back
  // each group has all of them.
  std::vector<std::int64_t> nodes;
  std::vector<std::int64_t> unbroken(pools_.size(), 0);
  std::size_t hit = 0;
  for (std::int64_t at = PrefixIndex::kRoot; nodes.size() < most;) {
    at = prefixes_.find(at, prompt.subspan(nodes.size() * size, size));
    if (at == PrefixIndex::kNone) break;
    nodes.push_back(at);
    const auto blocks = static_cast<std::int64_t>(nodes.size());
    bool complete = true;
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      unbroken[g] = prefixes_.node(at).blocks[g] < 0 ? 0 : unbroken[g] + 1;
      const std::int64_t first = first_seen(g, blocks * layout_.block_size) / layout_.block_size;
      if (unbroken[g] < blocks - first) complete = false;
    }
    if (complete) hit = nodes.size();
  }
  if (hit == 0) return 0;
  const Renewed renewed(*this, sequence);
  sequence.length = static_cast<std::int64_t>(hit) * layout_.block_size;
  sequence.remembered = static_cast<std::int64_t>(hit);
  stand(sequence, nodes[hit - 1]);
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    Part& part = sequence.parts[g];
    part.holes = first_seen(g, sequence.length) / layout_.block_size;
    for (std::size_t b = 0; b < hit; ++b) {
      const bool seen = static_cast<std::int64_t>(b) >= part.holes;
      part.table.push_back(seen ? prefixes_.node(nodes[b]).blocks[g] : -1);
      if (seen) hold(id, sequence, g, part.table.back());
    }
  }
  return sequence.length;
}

void KvCache::remember(SequenceId id, std::span<const TokenId> tokens) {
  Sequence& sequence = find(id);
  const Renewed renewed(*this, sequence);
  remember_blocks(id, sequence, tokens);
}

void KvCache::remember_blocks(SequenceId id, Sequence& sequence, std::span<const TokenId> tokens) {
  if (!layout_.prefix_reuse) return;
  const auto size = static_cast<std::size_t>(layout_.block_size);
  while ((sequence.remembered + 1) * layout_.block_size <= sequence.length) {
    const auto b = static_cast<std::size_t>(sequence.remembered);
    const auto own = tokens.subspan(b * size, size);
    std::int64_t next = prefixes_.find(sequence.prefix_node, own);
    if (next == PrefixIndex::kNone) {
      next = prefixes_.insert(sequence.prefix_node, own, pools_.size());
    } else if (would_cost(sequence, b, next)) {
      return;
    }
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      std::int32_t& entry = sequence.parts[g].table[b];
      const std::int32_t known = prefixes_.node(next).blocks[g];
      if (entry < 0 || entry == known) continue;
      if (known < 0) {
        prefixes_.set_block(next, g, entry);
        pools_[g].remember(entry, next);
      } else {
        // Another computed the same at the same time: one copy is enough.
        hold(id, sequence, g, known);
        const std::int32_t spare = std::exchange(entry, known);
        let_go(id, sequence, g, b, spare);
      }
    }
    stand(sequence, next);
    ++sequence.remembered;
  }
}

// Whether taking a node's block for entry `b` would leave fewer within reach: it is idle, and the
// entry's own block is not free then, since a fork holds it too.
bool KvCache::would_cost(const Sequence& sequence, std::size_t b, std::int64_t node) const {
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const std::int32_t entry = sequence.parts[g].table[b];
    const std::int32_t known = prefixes_.node(node).blocks[g];
    if (windowed(g) || entry == known) continue;
    if (pools_[g].holders(known) == 0 && pools_[g].holders(entry) > 1) return true;
  }
  return false;
}

std::int64_t KvCache::remembered_blocks() const {
  std::int64_t fewest = INT64_MAX;
  for (const KvPool& pool : pools_) fewest = std::min(fewest, pool.idle_blocks());
  return fewest;
}

void KvCache::stand(Sequence& sequence, std::int64_t node) {
  const std::int64_t before = std::exchange(sequence.prefix_node, node);
  prefixes_.stand(node, 1);
  prefixes_.stand(before, -1);
  prune(before);
}

// After a cut: only the first `blocks` blocks are still what was remembered.
void KvCache::step_back(Sequence& sequence, std::int64_t blocks) {
  while (sequence.remembered > blocks) {
    stand(sequence, prefixes_.node(sequence.prefix_node).parent);
    --sequence.remembered;
  }
}

// After a cut the last block may be one that the index knows as it was. Whoever holds it alone
// writes into it, and must not find it shared by then.
void KvCache::forget_partial(const Sequence& sequence, std::size_t group) {
  if (sequence.length % layout_.block_size == 0) return;
  const auto last = static_cast<std::size_t>(sequence.length / layout_.block_size);
  const std::int32_t block = sequence.parts[group].table[last];
  const KvPool& pool = pools_[group];
  if (block >= 0 && pool.holders(block) == 1 && pool.node(block) != KvPool::kNoNode) {
    forget(group, pool.node(block));
  }
}

// The index lets go of a node's block in this group.
void KvCache::forget(std::size_t group, std::int64_t node) {
  if (windowed(group)) {
    pools_[group].forget(prefixes_.node(node).blocks[group]);
    prefixes_.set_block(node, group, -1);
    prune(node);
    return;
  }
  prefixes_.erase(node, [&](const PrefixIndex::Node& gone) {
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      if (gone.blocks[g] >= 0) pools_[g].forget(gone.blocks[g]);
    }
  });
}

// Drops a node, and then those above it, that lead nowhere and know no block.
void KvCache::prune(std::int64_t node) {
  while (node != PrefixIndex::kRoot) {
    const PrefixIndex::Node& one = prefixes_.node(node);
    if (one.standing > 0 || !one.children.empty() ||
        std::any_of(one.blocks.begin(), one.blocks.end(), [](auto b) { return b >= 0; })) {
      return;
    }
    const std::int64_t parent = one.parent;
    prefixes_.erase(node, [](const PrefixIndex::Node&) {});
    node = parent;
  }
}

}  // namespace specrt
