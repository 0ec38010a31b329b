#include "core/prefix_index.h"

#include <algorithm>

namespace specrt {

std::uint64_t PrefixIndex::hash(std::int64_t parent, std::span<const TokenId> tokens) {
  std::uint64_t value = 0x9E3779B97F4A7C15u ^ static_cast<std::uint64_t>(parent);
  for (const TokenId token : tokens) {
    value ^= static_cast<std::uint32_t>(token);
    value *= 0xD6E8FEB86659FD93u;
    value ^= value >> 32;
  }
  return value;
}

std::int64_t PrefixIndex::find(std::int64_t parent, std::span<const TokenId> tokens) const {
  const auto [first, last] = by_hash_.equal_range(hash(parent, tokens));
  for (auto at = first; at != last; ++at) {
    const Node& node = nodes_.at(at->second);
    if (node.parent == parent &&
        std::equal(node.tokens.begin(), node.tokens.end(), tokens.begin(), tokens.end())) {
      return at->second;
    }
  }
  return kNone;
}

std::int64_t PrefixIndex::insert(std::int64_t parent, std::span<const TokenId> tokens,
                                 std::size_t groups) {
  const std::int64_t id = next_id_++;
  Node node;
  node.parent = parent;
  node.tokens.assign(tokens.begin(), tokens.end());
  node.blocks.assign(groups, -1);
  by_hash_.emplace(hash(parent, tokens), id);
  nodes_.emplace(id, std::move(node));
  if (parent != kRoot) nodes_.at(parent).children.push_back(id);
  return id;
}

void PrefixIndex::erase(std::int64_t id, const std::function<void(const Node&)>& removed) {
  std::vector<std::int64_t> pending = {id};
  if (const std::int64_t parent = nodes_.at(id).parent; parent != kRoot) {
    std::erase(nodes_.at(parent).children, id);
  }
  while (!pending.empty()) {
    const std::int64_t next = pending.back();
    pending.pop_back();
    const auto found = nodes_.find(next);
    const Node node = std::move(found->second);
    nodes_.erase(found);
    const auto [first, last] = by_hash_.equal_range(hash(node.parent, node.tokens));
    for (auto at = first; at != last; ++at) {
      if (at->second == next) {
        by_hash_.erase(at);
        break;
      }
    }
    pending.insert(pending.end(), node.children.begin(), node.children.end());
    removed(node);
  }
}

}  // namespace specrt
