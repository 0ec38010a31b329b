#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "specrt/types.h"

namespace specrt {

/// Full blocks of tokens by what came before them: a trie whose edges are blocks. A node is found
/// by its parent and its own tokens, both compared exactly, so a hit can never be a collision.
/// It says where K and V of those tokens are; which of them give way is up to the cache.
class PrefixIndex {
 public:
  static constexpr std::int64_t kRoot = 0;
  static constexpr std::int64_t kNone = -1;

  struct Node {
    std::int64_t parent = kRoot;
    std::vector<TokenId> tokens;
    std::vector<std::int32_t> blocks;  ///< one a group; -1 where the group has none any more
    std::vector<std::int64_t> children;
    std::int32_t standing = 0;  ///< sequences whose last remembered block this is
  };

  /// The child of `parent` that holds these tokens, or kNone.
  std::int64_t find(std::int64_t parent, std::span<const TokenId> tokens) const;
  /// Adds a child without blocks; ids are never used again. The parent exists.
  std::int64_t insert(std::int64_t parent, std::span<const TokenId> tokens, std::size_t groups);
  const Node& node(std::int64_t id) const { return nodes_.at(id); }
  bool contains(std::int64_t id) const { return id == kRoot || nodes_.count(id) != 0; }
  void set_block(std::int64_t id, std::size_t group, std::int32_t block) {
    nodes_.at(id).blocks[group] = block;
  }
  /// One more sequence, or one fewer, stands at this node.
  void stand(std::int64_t id, std::int32_t sequences) {
    if (id != kRoot) nodes_.at(id).standing += sequences;
  }
  /// Removes a node and everything below it, telling each node as it goes.
  void erase(std::int64_t id, const std::function<void(const Node&)>& removed);
  const std::unordered_map<std::int64_t, Node>& nodes() const { return nodes_; }

 private:
  static std::uint64_t hash(std::int64_t parent, std::span<const TokenId> tokens);

  std::unordered_map<std::int64_t, Node> nodes_;
  std::unordered_multimap<std::uint64_t, std::int64_t> by_hash_;
  std::int64_t next_id_ = 1;
};

}  // namespace specrt
