#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "specrt/draft_tree.h"
#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// A fixed shape for the drafts of a drafter that ranks alternatives: which ranks to try at which
/// depth, as Medusa's `medusa_choices` (Cai et al. 2401.10774). Only the tokens change from round
/// to round.
class SPECRT_API StaticTree {
 public:
  /// A node by the ranks on the way to it, 0 for the best.
  using Path = std::vector<std::int32_t>;
  struct Node {
    std::int32_t parent = DraftTree::kRoot;  ///< an earlier node or kRoot
    std::int32_t depth = 1;
    std::int32_t rank = 0;
  };
  static constexpr std::int32_t kMostRanks = 64;

  StaticTree() = default;
  /// One path a node, the most worthwhile first: where fewer nodes are asked for, the first ones
  /// are kept. A parent that is listed behind its child is moved in front of it. Throws
  /// InvalidArgument where there is no path, an empty one, a repeated one, one without its parent,
  /// or a rank that is not from 0 to kMostRanks - 1.
  explicit StaticTree(const std::vector<Path>& paths);

  static StaticTree chain(std::int32_t depth);
  /// Medusa's sparse tree of that name: 63 nodes, 4 deep, found by its authors for Vicuna-7B.
  static StaticTree mc_sim_7b_63();
  /// The `nodes` nodes that are accepted most often in sum, where accuracies[d][r] in [0, 1] is how
  /// often the alternative of rank r at depth d + 1 is right once the path to it was. Grown
  /// greedily by the product along the path, which is optimal since it only falls; of equal nodes
  /// the shallower, then the one of lower ranks. Those that are never accepted are left out.
  static StaticTree from_accuracies(const std::vector<std::vector<double>>& accuracies,
                                    std::int64_t nodes);

  std::span<const Node> nodes() const { return nodes_; }
  std::vector<Path> paths() const;
  std::int32_t depth() const { return static_cast<std::int32_t>(widths_.size()); }
  /// How many ranks the nodes of depth d >= 1 ask for.
  std::int32_t width(std::int32_t d) const { return widths_[static_cast<std::size_t>(d - 1)]; }
  bool is_chain() const { return std::ssize(nodes_) == depth(); }
  /// Without the nodes deeper than `depth` >= 1.
  StaticTree cut(std::int32_t depth) const;

  /// Makes a draft of at most `max_nodes` nodes and `max_depth` levels. candidate(depth, rank)
  /// gives {token, log-probability}, a token < 0 where there is no such alternative. `places` is
  /// scratch.
  template <typename Candidate>
  void fill(DraftTree& draft, std::int64_t max_nodes, std::int64_t max_depth,
            std::vector<std::int32_t>& places, const Candidate& candidate) const {
    constexpr std::int32_t kSkipped = -2;
    places.assign(nodes_.size(), kSkipped);
    std::int64_t left = max_nodes;
    for (std::size_t i = 0; i < nodes_.size() && left > 0; ++i) {
      const Node& node = nodes_[i];
      const std::int32_t parent = node.parent == DraftTree::kRoot
                                      ? DraftTree::kRoot
                                      : places[static_cast<std::size_t>(node.parent)];
      if (parent == kSkipped || node.depth > max_depth) continue;
      const auto [token, log_prob] = candidate(node.depth, node.rank);
      if (token < 0) continue;
      places[i] = draft.add(token, parent, log_prob);
      --left;
    }
  }

 private:
  std::vector<Node> nodes_;
  std::vector<std::int32_t> widths_;
};

}  // namespace specrt
