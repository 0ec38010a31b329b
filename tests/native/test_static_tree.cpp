// Fixed trees of ranks.

#include <random>
#include <string>

#include "check.h"
#include "specrt/error.h"
#include "specrt/static_tree.h"

namespace {

using specrt::DraftTree;
using specrt::InvalidArgument;
using specrt::StaticTree;
using Path = StaticTree::Path;
using Paths = std::vector<Path>;

/// Token 100 * depth + rank.
DraftTree filled(const StaticTree& tree, std::int64_t nodes, std::int64_t depth,
                 std::int32_t ranks = 64) {
  DraftTree draft;
  std::vector<std::int32_t> places;
  tree.fill(draft, nodes, depth, places, [&](std::int32_t d, std::int32_t rank) {
    return std::pair<specrt::TokenId, float>(rank < ranks ? 100 * d + rank : -1, 0.0f);
  });
  return draft;
}

}  // namespace

TEST(static_tree_shapes) {
  const StaticTree one(Paths{{3}});
  CHECK_EQ(one.depth(), 1);
  CHECK_EQ(one.width(1), 4);
  CHECK(one.is_chain());
  const StaticTree chain = StaticTree::chain(4);
  CHECK_EQ(chain.depth(), 4);
  CHECK(chain.is_chain());
  const DraftTree drafted = filled(chain, 4, 4);
  CHECK((std::vector<int>(drafted.tokens().begin(), drafted.tokens().end()) ==
         std::vector<int>{100, 200, 300, 400}));
  const StaticTree wide(Paths{{0}, {1}, {2}, {3}});
  CHECK_EQ(wide.depth(), 1);
  CHECK(!wide.is_chain());
  CHECK_EQ(filled(wide, 9, 9).size(), 4u);
  // A parent behind its child is moved in front of it, and nothing else.
  const StaticTree late(Paths{{0, 1}, {2}, {0}});
  CHECK((late.paths() == Paths{{0}, {0, 1}, {2}}));
}

TEST(static_tree_refuses) {
  CHECK_THROWS(StaticTree(Paths{}), InvalidArgument, "at least one path");
  CHECK_THROWS(StaticTree(Paths{{}}), InvalidArgument, "an empty one");
  CHECK_THROWS(StaticTree(Paths{{0}, {0}}), InvalidArgument, "[0] twice");
  CHECK_THROWS(StaticTree(Paths{{0}, {1, 0}}), InvalidArgument, "the parent [1] of [1, 0]");
  CHECK_THROWS(StaticTree(Paths{{0}, {-1}}), InvalidArgument, "ranks from 0");
  CHECK_THROWS(StaticTree(Paths{{64}}), InvalidArgument, "ranks from 0");
  CHECK_THROWS(StaticTree::chain(0), InvalidArgument, "at least one path");
}

TEST(static_tree_keeps_the_first_nodes) {
  const StaticTree tree = StaticTree::mc_sim_7b_63();
  CHECK_EQ(tree.nodes().size(), 63u);
  CHECK_EQ(tree.depth(), 4);
  CHECK_EQ(tree.width(1), 10);
  CHECK_EQ(tree.width(2), 10);
  CHECK_EQ(tree.width(3), 10);
  CHECK_EQ(tree.width(4), 2);
  for (std::int64_t nodes = 0; nodes <= 70; ++nodes) {
    const DraftTree draft = filled(tree, nodes, 4);
    CHECK_EQ(static_cast<std::int64_t>(draft.size()), std::min<std::int64_t>(nodes, 63));
    const Paths paths = tree.paths();
    for (std::size_t i = 0; i < draft.size(); ++i) {
      const auto depth = static_cast<std::int32_t>(paths[i].size());
      CHECK_EQ(draft.depths()[i], depth);
      CHECK_EQ(draft.tokens()[i], 100 * depth + paths[i].back());
    }
  }
  // Depths and ranks that are not there are left out with all that hangs on them.
  for (std::int32_t depth = 1; depth <= 4; ++depth) {
    CHECK_EQ(filled(tree, 63, depth).size(), tree.cut(depth).nodes().size());
    CHECK_EQ(filled(tree, 63, depth).max_depth(), depth);
  }
  const DraftTree narrow = filled(tree, 63, 4, 2);
  for (const specrt::TokenId token : narrow.tokens()) CHECK(token % 100 < 2);
  CHECK(narrow.size() > 5);
}

TEST(static_tree_from_accuracies_is_the_best_there_is) {
  CHECK((StaticTree::from_accuracies({{0.6, 0.2}, {0.5, 0.4}}, 4).paths() ==
         Paths{{0}, {0, 0}, {0, 1}, {1}}));
  // Ranks need not be sorted; equal nodes: the shallower, then the lower rank.
  CHECK((StaticTree::from_accuracies({{0.25, 0.5, 0.25}, {0.5}}, 4).paths() ==
         Paths{{1}, {0}, {2}, {1, 0}}));
  CHECK((StaticTree::from_accuracies({{0.9, 0.0}, {0.0}}, 10).paths() == Paths{{0}}));
  CHECK_THROWS(StaticTree::from_accuracies({{0.0}}, 3), InvalidArgument, "at least one path");
  CHECK_THROWS(StaticTree::from_accuracies({{1.5}}, 3), InvalidArgument, "from 0 to 1");
  CHECK_THROWS(StaticTree::from_accuracies({{0.5}}, 0), InvalidArgument, "nodes");
  // Against every set of nodes closed under parents, where there are few.
  std::mt19937_64 random(5);
  const auto value = [&] { return static_cast<double>(random() % 1000) / 1000.0; };
  for (int round = 0; round < 50; ++round) {
    const std::vector<std::vector<double>> accuracies = {{value(), value()}, {value(), value()}};
    const Paths all = {{0}, {1}, {0, 0}, {0, 1}, {1, 0}, {1, 1}};
    const auto worth = [&](const Path& path) {
      double product = 1.0;
      for (std::size_t d = 0; d < path.size(); ++d) {
        product *= accuracies[d][static_cast<std::size_t>(path[d])];
      }
      return product;
    };
    for (std::int64_t count = 1; count <= 4; ++count) {
      double best = 0.0;
      for (unsigned set = 0; set < 64; ++set) {
        if (__builtin_popcount(set) != count) continue;
        if ((set & 0b001100u) != 0 && (set & 1u) == 0) continue;
        if ((set & 0b110000u) != 0 && (set & 2u) == 0) continue;
        double sum = 0.0;
        for (unsigned i = 0; i < 6; ++i) {
          if ((set >> i & 1u) != 0) sum += worth(all[i]);
        }
        best = std::max(best, sum);
      }
      double sum = 0.0;
      for (const Path& path : StaticTree::from_accuracies(accuracies, count).paths()) {
        sum += worth(path);
      }
      CHECK_NEAR(sum, best, 1e-12);
    }
  }
}
