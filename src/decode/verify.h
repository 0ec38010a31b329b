#pragma once

#include <cstdint>
#include <vector>

#include "specrt/draft_tree.h"
#include "specrt/types.h"

namespace specrt {

/// Why a walk is over.
enum class WalkEnd : std::uint8_t {
  running = 0,
  mismatch,  ///< the choice is none of the node's children (or it has none): the bonus token
  stop,      ///< the choice is a stop token
  length,    ///< the choice was the last one allowed
};

/// The path that verification takes through a draft. With `coupled` verification (Daliri et al.
/// 2408.07978) the target makes its own choice at each node, and the walk goes on into the child
/// that carries it: what is emitted is what the target would have chosen without a draft.
class TreeWalk {
 public:
  /// `limit` >= 1 tokens may be emitted.
  void start(std::int64_t limit);

  bool running() const { return end_ == WalkEnd::running; }
  WalkEnd end() const { return end_; }
  /// The node whose logits decide next; DraftTree::kRoot is the last committed token.
  std::int32_t node() const { return node_; }
  /// The choice at node(), and the child that carries it (negative: none, the walk ends).
  void step(TokenId choice, std::int32_t child, bool is_stop);

  /// Every choice made, in order; all but the last are nodes of the tree: path().
  const std::vector<TokenId>& emitted() const { return emitted_; }
  const std::vector<std::int32_t>& path() const { return path_; }

 private:
  std::int64_t limit_ = 0;
  std::int32_t node_ = DraftTree::kRoot;
  WalkEnd end_ = WalkEnd::running;
  std::vector<TokenId> emitted_;
  std::vector<std::int32_t> path_;
};

}  // namespace specrt
