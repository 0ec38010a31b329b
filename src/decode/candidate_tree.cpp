#include "decode/candidate_tree.h"

#include <algorithm>
#include <cmath>

namespace specrt {

void CandidateTree::clear() {
  all_.clear();
  level_begin_ = 0;
}

void CandidateTree::add(TokenId token, std::int32_t parent, float step, float log_prob) {
  const float before = parent < 0 ? 0.0f : at(parent).score;
  // Rounding of a log-softmax can leave a trace above 0.
  all_.push_back({token, parent, before + std::min(step, 0.0f), log_prob});
}

// chosen_ holds candidates; leaves its best, best first.
void CandidateTree::keep_best(std::int64_t most) {
  const auto better = [this](std::int32_t a, std::int32_t b) {
    return at(a).score > at(b).score || (at(a).score == at(b).score && a < b);
  };
  const auto count =
      std::min(chosen_.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, most)));
  std::partial_sort(chosen_.begin(), chosen_.begin() + static_cast<std::ptrdiff_t>(count),
                    chosen_.end(), better);
  chosen_.resize(count);
}

std::span<const std::int32_t> CandidateTree::close_level(std::int64_t most) {
  chosen_.clear();
  for (std::size_t i = level_begin_; i < all_.size(); ++i) {
    chosen_.push_back(static_cast<std::int32_t>(i));
  }
  level_begin_ = all_.size();
  keep_best(most);
  return chosen_;
}

void CandidateTree::finish(std::int64_t nodes, DraftTree& out) {
  chosen_.clear();
  for (std::size_t i = 0; i < all_.size(); ++i) chosen_.push_back(static_cast<std::int32_t>(i));
  keep_best(nodes);
  std::sort(chosen_.begin(), chosen_.end());
  node_of_.resize(all_.size());
  for (const std::int32_t candidate : chosen_) {
    const Candidate& c = at(candidate);
    // Its score is not above its parent's, which came earlier: the parent is among the best too.
    const std::int32_t parent =
        c.parent < 0 ? DraftTree::kRoot : node_of_[static_cast<std::size_t>(c.parent)];
    node_of_[static_cast<std::size_t>(candidate)] = out.add(c.token, parent, c.log_prob);
  }
}

void make_static_shape(std::int64_t nodes, std::int64_t depth, std::int64_t top_k,
                       CandidateTree& scratch, DraftTree& out) {
  scratch.clear();
  out.clear();
  const auto grow = [&](std::int32_t parent) {
    for (std::int64_t r = 0; r < top_k; ++r) {
      const float step = static_cast<float>(r + 1) * std::log(0.5f);
      scratch.add(static_cast<TokenId>(r), parent, step, step);
    }
  };
  grow(-1);
  std::vector<std::int32_t> frontier;
  for (std::int64_t level = 2; level <= depth; ++level) {
    const std::span<const std::int32_t> best = scratch.close_level(top_k);
    frontier.assign(best.begin(), best.end());
    for (const std::int32_t candidate : frontier) grow(candidate);
  }
  scratch.finish(nodes, out);
}

}  // namespace specrt
