#include <algorithm>
#include <string>

#include "core/kv_cache.h"
#include "specrt/error.h"

// Proofs that the books agree, for tests and for `check_invariants`.

namespace specrt {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw InternalError("[kv cache] broken invariant: " + otherwise);
}

}  // namespace

void KvCache::check_invariants() const {
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    const KvPool& pool = pools_[g];
    std::vector<std::int32_t> holders(static_cast<std::size_t>(pool.size()), 0);
    std::vector<std::int32_t> owners(holders.size(), 0);
    std::int64_t set_aside = 0;
    for (const auto& [id, sequence] : sequences_) {
      const std::string who = "sequence " + std::to_string(id);
      const Part& part = sequence.parts[g];
      const Standing own = standing(sequence, g);
      require(own.owed() >= 0, who + " has taken more than it was promised");
      set_aside += own.owed();
      require(blocks_for(sequence.length) <= own.entries, who + " is longer than its table");
      require(own.entries <= own.reserved_entries,
              who + "'s table is longer than what is reserved");
      require(!own.windowed || own.held <= own.reserved, who + " holds more than is reserved");
      require(part.holes == 0 || own.windowed, "a hole without a window");
      std::int64_t owned = 0;
      for (std::int64_t b = 0; b < own.entries; ++b) {
        const std::int32_t block = part.table[static_cast<std::size_t>(b)];
        require((block == -1) == (b < part.holes), "holes miscounted");
        if (block == -1) continue;
        require(block >= 0 && block < pool.size(),
                "a table of " + who + " names block " + std::to_string(block));
        ++holders[static_cast<std::size_t>(block)];
        if (pool.owner(block) != id) continue;
        ++owned;
        ++owners[static_cast<std::size_t>(block)];
      }
      require(owned == part.owned, who + "'s own blocks are miscounted");
    }
    pool.check_invariants(holders);
    for (std::size_t b = 0; b < holders.size(); ++b) {
      require(owners[b] == (holders[b] > 0 ? 1 : 0),
              "block " + std::to_string(b) + " is held and has no owner, or more than one");
    }
    require(set_aside == set_aside_[g],
            "set aside " + std::to_string(set_aside_[g]) + ", owed " + std::to_string(set_aside));
    require(set_aside <= pool.within_reach(), "more promised than within reach");
  }
  check_prefixes();
}

void KvCache::check_prefixes() const {
  std::unordered_map<std::int64_t, std::int32_t> standing;
  for (const auto& [id, sequence] : sequences_) {
    const std::string who = "sequence " + std::to_string(id);
    require(prefixes_.contains(sequence.prefix_node), who + " stands at a node that is gone");
    require(sequence.remembered * layout_.block_size <= sequence.length,
            who + " has more remembered than committed");
    ++standing[sequence.prefix_node];
    std::int64_t at = sequence.prefix_node;
    for (std::int64_t b = sequence.remembered; b-- > 0;) {
      require(at != PrefixIndex::kRoot, who + " has more remembered than its chain is long");
      const PrefixIndex::Node& node = prefixes_.node(at);
      for (std::size_t g = 0; g < pools_.size(); ++g) {
        const std::int32_t entry = sequence.parts[g].table[static_cast<std::size_t>(b)];
        require(entry == -1 || entry == node.blocks[g], who + " strays from its chain");
      }
      at = node.parent;
    }
    require(at == PrefixIndex::kRoot, who + " has less remembered than its chain is long");
  }
  std::vector<std::int64_t> known(pools_.size(), 0);
  for (const auto& [id, node] : prefixes_.nodes()) {
    require(prefixes_.contains(node.parent), "a node without its parent");
    const auto here = standing.find(id);
    require(node.standing == (here == standing.end() ? 0 : here->second),
            "the sequences at a node are miscounted");
    bool of_use = node.standing > 0 || !node.children.empty();
    for (std::size_t g = 0; g < pools_.size(); ++g) {
      const std::int32_t block = node.blocks[g];
      require(block >= 0 || windowed(g), "a node without its block in a group without a window");
      if (block < 0) continue;
      of_use = true;
      ++known[g];
      require(pools_[g].node(block) == id, "the prefix index holds a block unknown to its pool");
    }
    require(of_use, "a node that is of no use");
  }
  for (std::size_t g = 0; g < pools_.size(); ++g) {
    std::int64_t blocks = 0;
    for (std::int64_t b = 0; b < pools_[g].size(); ++b) {
      if (pools_[g].node(static_cast<std::int32_t>(b)) != KvPool::kNoNode) ++blocks;
    }
    require(blocks == known[g], "a pool knows a block that the prefix index does not");
  }
}

std::vector<bool> KvCache::filled_slots(std::int64_t group) const {
  const auto g = static_cast<std::size_t>(group);
  std::vector<bool> filled(static_cast<std::size_t>(
      layout_.groups[g].num_blocks * layout_.block_size + layout_.scratch_slots));
  const auto fill = [&](std::int32_t block, std::int64_t positions) {
    const auto first = filled.begin() + block * layout_.block_size;
    std::fill(first, first + std::min(positions, layout_.block_size), true);
  };
  for (const auto& [id, sequence] : sequences_) {
    const auto& table = sequence.parts[g].table;
    for (std::int64_t b = 0; b < blocks_for(sequence.length); ++b) {
      const std::int32_t block = table[static_cast<std::size_t>(b)];
      if (block >= 0) fill(block, sequence.length - b * layout_.block_size);
    }
  }
  for (const auto& [id, node] : prefixes_.nodes()) {
    if (node.blocks[g] >= 0) fill(node.blocks[g], layout_.block_size);
  }
  return filled;
}

}  // namespace specrt
