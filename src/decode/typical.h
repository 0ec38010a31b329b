#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "specrt/draft_tree.h"
#include "specrt/sampling.h"

namespace specrt {

/// How likely a token has to be under `law` (summing to 1) to be typical: min(threshold,
/// alpha * exp(-H)), where H is the entropy with log(p + 1e-5). A token passes that is strictly
/// likelier.
double typical_bound(std::span<const float> law, double threshold, double alpha);

/// Typical acceptance of a draft tree (Medusa, Cai et al. 2401.10774), which is lossy: a node is
/// accepted if its parent is and it is typical there; what is kept is the longest accepted path, of
/// several the likeliest, then the first. Nodes whose law is wanted come in order.
class TypicalWalk {
 public:
  void start(const DraftTree& tree, const SamplingParams& params);
  bool running() const { return node_ < size_; }
  /// Whose law is wanted next; DraftTree::kRoot comes first.
  std::int32_t node() const { return node_; }
  /// Whether node() would be the end of the path, as far as is known: then the token behind it is
  /// wanted as well.
  bool leads() const { return better(node_); }
  /// Whether a node has been accepted.
  bool accepted(std::int32_t node) const { return node < 0 || accepted_[node] != 0; }
  void step(std::span<const float> law);
  /// The nodes that are kept, root side first; valid after the last step.
  std::span<const std::int32_t> path() const { return path_; }

 private:
  bool better(std::int32_t node) const;
  void lead(std::int32_t node);
  bool ends(std::int32_t node) const;
  void next();

  const DraftTree* tree_ = nullptr;
  const SamplingParams* params_ = nullptr;
  std::int32_t size_ = 0;
  std::int32_t node_ = 0;
  std::int32_t best_ = DraftTree::kRoot;
  std::vector<char> accepted_;
  std::vector<char> inner_;         // has children
  std::vector<double> likelihood_;  // log-probability of the path to a node
  std::vector<std::int32_t> path_;
};

}  // namespace specrt
