#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// How a drafter came to its nodes; `rejection` verification has to know.
enum class Draw : std::uint8_t {
  deterministic = 0,    ///< picked, not sampled: the most likely, or copied
  without_replacement,  ///< siblings sampled in order, each from what the ones before left
  with_replacement,     ///< siblings sampled independently; a repeated token is a repeated node
};

/// A draft: candidate continuations of one sequence. Node i continues node parents[i], or the
/// sequence itself where that is kRoot. Parents come before children; siblings differ in token.
/// A chain is the tree in which every node's parent is the node before it.
class SPECRT_API DraftTree {
 public:
  static constexpr std::int32_t kRoot = -1;

  DraftTree() = default;

  /// Checks everything; throws InvalidArgument. `log_probs` is empty or one value a node:
  /// the drafter's natural-log probability of the node's token given its parent.
  DraftTree(std::vector<TokenId> tokens, std::vector<std::int32_t> parents,
            std::vector<float> log_probs = {}, std::string source = {});

  static DraftTree chain(std::span<const TokenId> tokens, std::string source = {});

  std::size_t size() const { return tokens_.size(); }
  bool empty() const { return tokens_.empty(); }
  std::span<const TokenId> tokens() const { return tokens_; }
  std::span<const std::int32_t> parents() const { return parents_; }
  std::span<const std::int32_t> depths() const { return depths_; }  ///< 1 for children of the root
  std::span<const float> log_probs() const { return log_probs_; }
  const std::string& source() const { return source_; }
  std::int32_t max_depth() const;

  /// The child of `node` (kRoot allowed) that carries `token`, or -2 where there is none.
  std::int32_t child(std::int32_t node, TokenId token) const;
  bool has_children(std::int32_t node) const;

  Draw draw() const { return draw_; }
  void set_draw(Draw draw) { draw_ = draw; }

  /// The probabilities from which the children of `node` (kRoot allowed) were sampled, one a
  /// vocabulary id, or nothing.
  std::span<const float> distribution(std::int32_t node) const;
  /// For sampled drafts. All distributions of a tree have one size.
  void set_distribution(std::int32_t node, std::span<const float> probabilities);

  /// Empties the tree and keeps its memory.
  void clear();
  void set_source(const std::string& source) { source_ = source; }

  /// Of a draft that several drafters share in: their names, at most 32, and for each node those
  /// that proposed it, bit i for sources()[i]. No names: all nodes are of source().
  std::span<const std::string> sources() const { return sources_; }
  void set_sources(std::span<const std::string> names);
  std::uint32_t sources_of(std::int32_t node) const;
  void set_sources_of(std::int32_t node, std::uint32_t bits);

  /// Appends a node and returns its index. Throws InvalidArgument where the parent is not an
  /// earlier node or kRoot, or where a sibling already carries the token (but for draws with
  /// replacement).
  std::int32_t add(TokenId token, std::int32_t parent, float log_prob = 0.0f);

  /// Drops nodes deeper than `depth`, then the last nodes beyond `nodes`. Both keep every
  /// remaining node's parent. Returns whether anything was dropped.
  bool prune(std::int64_t depth, std::int64_t nodes);

  /// Drops the nodes that are not marked. Marked nodes' parents are marked too.
  bool keep(const std::vector<bool>& kept);

  /// Throws InvalidArgument if a token lies outside [0, vocab_size).
  void check_vocabulary(std::int64_t vocab_size) const;

 private:
  template <typename Keep>
  bool compact(const Keep& keep);

  std::vector<TokenId> tokens_;
  std::vector<std::int32_t> parents_;
  std::vector<std::int32_t> depths_;
  std::vector<float> log_probs_;
  std::string source_;
  std::vector<std::string> sources_;
  std::vector<std::uint32_t> node_sources_;  // of a node, where sources_ names any
  Draw draw_ = Draw::deterministic;
  std::vector<float> distributions_;
  std::vector<std::int32_t> distribution_row_;  // by node + 1; -1: none
  std::size_t distribution_size_ = 0;
};

}  // namespace specrt
