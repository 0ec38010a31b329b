#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "specrt/draft_tree.h"
#include "specrt/types.h"

namespace specrt {

/// A draft that grows level by level (EAGLE-2, Li et al. 2406.16858): every node of the frontier
/// proposes children, the best of a level are the next frontier, and the best of all candidates
/// become the draft. A node's score is the sum of log-probabilities along its path. Equal scores
/// go to the one that came first, so that a node never stands behind its children. Allocates
/// nothing once it has been as large.
class CandidateTree {
 public:
  void clear();

  /// A child of candidate `parent` (-1: the root), of the level that is being made. `step` <= 0 is
  /// what it adds to its parent's score, `log_prob` what the draft says of it.
  void add(TokenId token, std::int32_t parent, float step, float log_prob);
  /// Closes the level: its `most` best candidates, best first.
  std::span<const std::int32_t> close_level(std::int64_t most);

  TokenId token(std::int32_t candidate) const { return at(candidate).token; }
  std::int32_t parent(std::int32_t candidate) const { return at(candidate).parent; }
  std::int64_t size() const { return static_cast<std::int64_t>(all_.size()); }

  /// The best `nodes` of all candidates, in the order in which they came.
  void finish(std::int64_t nodes, DraftTree& out);

 private:
  struct Candidate {
    TokenId token = 0;
    std::int32_t parent = -1;
    float score = 0.0f;
    float log_prob = 0.0f;
  };
  const Candidate& at(std::int32_t candidate) const {
    return all_[static_cast<std::size_t>(candidate)];
  }
  void keep_best(std::int64_t most);

  std::vector<Candidate> all_;
  std::size_t level_begin_ = 0;
  std::vector<std::int32_t> chosen_;
  std::vector<std::int32_t> node_of_;  // by candidate
};

/// The same growth with scores that no draw decides: child r of a node counts half as much as child
/// r - 1. Node tokens are ranks. For drafts that are sampled: which nodes there are may not depend
/// on what was drawn for them.
void make_static_shape(std::int64_t nodes, std::int64_t depth, std::int64_t top_k,
                       CandidateTree& scratch, DraftTree& out);

}  // namespace specrt
