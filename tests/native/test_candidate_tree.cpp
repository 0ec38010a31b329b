// Drafts that grow level by level.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "decode/candidate_tree.h"
#include "tiny_model.h"

namespace {

using specrt::CandidateTree;
using specrt::DraftTree;
using specrt::TokenId;

// A tree of `levels` levels with random children, `fill` giving a child's log-probability.
template <typename Fill>
void grow(CandidateTree& tree, std::int64_t levels, std::int64_t top_k, const Fill& fill) {
  tree.clear();
  std::vector<std::int32_t> frontier = {-1};
  for (std::int64_t level = 1; level <= levels; ++level) {
    for (const std::int32_t node : frontier) {
      for (std::int64_t child = 0; child < top_k; ++child) {
        const float step = fill();
        tree.add(static_cast<TokenId>(child), node, step, step);
      }
    }
    const auto best = tree.close_level(top_k);
    CHECK(static_cast<std::int64_t>(best.size()) <= top_k);
    frontier.assign(best.begin(), best.end());
  }
}

}  // namespace

TEST(candidate_tree_by_hand) {
  CandidateTree tree;
  tree.add(7, -1, std::log(0.5f), 0.0f);  // 0: .5
  tree.add(8, -1, std::log(0.3f), 0.0f);  // 1: .3
  tree.add(9, -1, std::log(0.2f), 0.0f);  // 2: .2
  auto best = tree.close_level(2);
  CHECK(std::vector<std::int32_t>(best.begin(), best.end()) == (std::vector<std::int32_t>{0, 1}));
  tree.add(1, 0, std::log(0.5f), 0.0f);   // 3: .25
  tree.add(2, 0, std::log(0.1f), 0.0f);   // 4: .05
  tree.add(3, 1, std::log(0.9f), 0.0f);   // 5: .27
  tree.add(4, 1, std::log(0.05f), 0.0f);  // 6
  best = tree.close_level(2);
  CHECK(std::vector<std::int32_t>(best.begin(), best.end()) == (std::vector<std::int32_t>{5, 3}));
  DraftTree draft;
  tree.finish(4, draft);  // .5 .3 .27 .25, in the order in which they came
  const std::vector<TokenId> tokens(draft.tokens().begin(), draft.tokens().end());
  const std::vector<std::int32_t> parents(draft.parents().begin(), draft.parents().end());
  CHECK(tokens == (std::vector<TokenId>{7, 8, 1, 3}));
  CHECK(parents == (std::vector<std::int32_t>{-1, -1, 0, 1}));
}

// Whatever the scores, equal ones too: no node without its parent, and none left out that is
// better.
TEST(candidate_tree_keeps_the_best) {
  std::mt19937_64 random(3);
  CandidateTree tree;
  for (int round = 0; round < 300; ++round) {
    const std::int64_t top_k = 1 + static_cast<std::int64_t>(random() % 6);
    const std::int64_t levels = 1 + static_cast<std::int64_t>(random() % 5);
    const bool coarse = round % 2 == 0;  // many ties, at 0 as well
    grow(tree, levels, top_k, [&] {
      const auto value = static_cast<float>(random() % 1000) / 1000.0f;
      return coarse ? -std::floor(value * 3.0f) : -5.0f * value;
    });
    const std::int64_t nodes = 1 + static_cast<std::int64_t>(random() % 40);
    DraftTree draft;
    tree.finish(nodes, draft);  // which throws for a parent that is not there
    CHECK_EQ(static_cast<std::int64_t>(draft.size()), std::min(nodes, tree.size()));
    CHECK(draft.max_depth() <= levels);
  }
}

TEST(candidate_tree_static_shapes) {
  CandidateTree scratch;
  DraftTree chain;
  specrt::make_static_shape(4, 9, 1, scratch, chain);
  for (std::int32_t node = 0; node < 4; ++node) {
    CHECK_EQ(chain.parents()[static_cast<std::size_t>(node)], node - 1);
  }
  for (const std::int64_t depth : {1, 2, 4, 8}) {
    DraftTree shape;
    specrt::make_static_shape(20, depth, 4, scratch, shape);
    CHECK(shape.max_depth() <= depth);
    // Children are there in draw order: a later one only beside all earlier ones.
    for (std::size_t node = 0; node < shape.size(); ++node) {
      for (TokenId rank = 0; rank < shape.tokens()[node]; ++rank) {
        CHECK(shape.child(shape.parents()[node], rank) >= 0);
      }
    }
  }
  DraftTree one;
  specrt::make_static_shape(1, 5, 3, scratch, one);
  CHECK_EQ(one.size(), std::size_t{1});
}

// EAGLE-2's own sizes. Counted, not timed: what a level is searched for stays small.
TEST(candidate_tree_of_the_usual_size) {
  std::mt19937_64 random(5);
  CandidateTree tree;
  grow(tree, 8, 10, [&] { return -static_cast<float>(random() % 1000) / 200.0f; });
  CHECK_EQ(tree.size(), 10 + 7 * 100);
  DraftTree draft;
  tree.finish(59, draft);
  CHECK_EQ(draft.size(), std::size_t{59});
}
