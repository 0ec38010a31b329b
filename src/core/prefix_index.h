#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "specrt/types.h"

namespace specrt {

/// Full blocks of tokens by what came before them: a trie whose edges are blocks. A node is found
/// by its parent and its own tokens, both compared exactly, so a hit can never be a collision.
class PrefixIndex {
 public:
  static constexpr std::int64_t kRoot = 0;
  static constexpr std::int64_t kNone = -1;

  struct Node {
    std::int64_t parent = kRoot;
    std::vector<TokenId> tokens;
    std::vector<std::int32_t> blocks;  ///< one a group
    std::vector<std::int64_t> children;
    std::int64_t last_use = 0;
  };

  /// The child of `parent` that holds these tokens, or kNone.
  std::int64_t find(std::int64_t parent, std::span<const TokenId> tokens) const;
  /// Adds a child; ids are never used again. The parent exists.
  std::int64_t insert(std::int64_t parent, std::span<const TokenId> tokens,
                      std::span<const std::int32_t> blocks);
  const Node& node(std::int64_t id) const { return nodes_.at(id); }
  bool contains(std::int64_t id) const { return id == kRoot || nodes_.count(id) != 0; }
  /// Makes it the most recently used.
  void touch(std::int64_t id);
  /// Removes a node and everything below it, telling each node as it goes.
  void erase(std::int64_t id, const std::function<void(const Node&)>& removed);
  /// The least recently used node that `wanted` accepts, or kNone.
  std::int64_t oldest(const std::function<bool(const Node&)>& wanted) const;
  const std::unordered_map<std::int64_t, Node>& nodes() const { return nodes_; }

 private:
  static std::uint64_t hash(std::int64_t parent, std::span<const TokenId> tokens);

  std::unordered_map<std::int64_t, Node> nodes_;
  std::unordered_multimap<std::uint64_t, std::int64_t> by_hash_;
  std::set<std::pair<std::int64_t, std::int64_t>> by_use_;  // (last_use, id)
  std::int64_t next_id_ = 1;
  std::int64_t clock_ = 0;
};

}  // namespace specrt
