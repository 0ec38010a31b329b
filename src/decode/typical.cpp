#include "decode/typical.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"

namespace specrt {

double typical_bound(std::span<const float> law, double threshold, double alpha) {
  double entropy = 0.0;
  for (std::size_t begin = 0; begin < law.size(); begin += cpu::kVocabChunk) {
    const std::size_t end = std::min(law.size(), begin + cpu::kVocabChunk);
    double chunk = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      const double p = law[i];
      if (p > 0.0) chunk -= p * std::log(p + 1e-5);
    }
    entropy += chunk;
  }
  return std::min(threshold, alpha * std::exp(-entropy));
}

void TypicalWalk::start(const DraftTree& tree, const SamplingParams& params) {
  tree_ = &tree;
  params_ = &params;
  size_ = static_cast<std::int32_t>(tree.size());
  node_ = DraftTree::kRoot;
  best_ = DraftTree::kRoot;
  accepted_.assign(tree.size(), 0);
  inner_.assign(tree.size(), 0);
  likelihood_.assign(tree.size(), 0.0);
  for (const std::int32_t parent : tree.parents()) {
    if (parent >= 0) inner_[static_cast<std::size_t>(parent)] = 1;
  }
  path_.clear();
}

bool TypicalWalk::better(std::int32_t node) const {
  if (best_ == DraftTree::kRoot || node == best_) return true;
  if (node == DraftTree::kRoot) return false;
  const auto depths = tree_->depths();
  const std::int32_t gain = depths[node] - depths[best_];
  return gain > 0 || (gain == 0 && likelihood_[node] > likelihood_[best_]);
}

void TypicalWalk::lead(std::int32_t node) {
  if (better(node)) best_ = node;
}

void TypicalWalk::step(std::span<const float> law) {
  lead(node_);
  double bound = -1.0;
  for (std::int32_t child = node_ + 1; child < size_; ++child) {
    if (tree_->parents()[child] != node_) continue;
    if (bound < 0.0) {
      bound = typical_bound(law, params_->posterior_threshold, params_->posterior_alpha);
    }
    const TokenId token = tree_->tokens()[child];
    const double p = law[static_cast<std::size_t>(token)];
    if (!(p > bound)) continue;
    accepted_[child] = 1;
    likelihood_[child] = std::log(p) + (node_ >= 0 ? likelihood_[node_] : 0.0);
    if (ends(child)) lead(child);
  }
  next();
}

// The text ends at a stop token: what is drafted behind it does not count, and no law is wanted.
bool TypicalWalk::ends(std::int32_t node) const {
  const auto& stops = params_->stop_token_ids;
  return std::find(stops.begin(), stops.end(), tree_->tokens()[node]) != stops.end();
}

void TypicalWalk::next() {
  for (++node_; node_ < size_; ++node_) {
    if (accepted_[node_] == 0 || ends(node_)) continue;
    if (inner_[node_] != 0 || better(node_)) return;
  }
  for (std::int32_t at = best_; at >= 0; at = tree_->parents()[at]) path_.push_back(at);
  std::reverse(path_.begin(), path_.end());
}

}  // namespace specrt
