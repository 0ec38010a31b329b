#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "specrt/draft_tree.h"
#include "specrt/error.h"

namespace {

using specrt::DraftTree;
using specrt::InvalidArgument;
using specrt::TokenId;
using Ints = std::vector<std::int32_t>;

Ints list(std::span<const std::int32_t> values) { return {values.begin(), values.end()}; }

void check_lengths(const DraftTree& tree) {
  CHECK_EQ(tree.tokens().size(), tree.size());
  CHECK_EQ(tree.parents().size(), tree.size());
  CHECK_EQ(tree.depths().size(), tree.size());
  CHECK_EQ(tree.log_probs().size(), tree.size());
}

// 0   1        roots
// 2 3 4        children of 0, 0, 1
// 5            child of 3
DraftTree sample() { return DraftTree({7, 8, 7, 9, 7, 1}, {-1, -1, 0, 0, 1, 3}); }

}  // namespace

TEST(draft_tree_of_depth_one) {
  const DraftTree tree({4, 3, 2, 1}, {-1, -1, -1, -1});
  CHECK_EQ(tree.size(), 4u);
  CHECK_EQ(tree.max_depth(), 1);
  CHECK(list(tree.depths()) == (Ints{1, 1, 1, 1}));
  for (std::int32_t i = 0; i < 4; ++i) {
    CHECK_EQ(tree.child(DraftTree::kRoot, 4 - i), i);
    CHECK(!tree.has_children(i));
  }
}

TEST(draft_tree_chain) {
  const DraftTree chain = DraftTree::chain(std::vector<TokenId>{5, 5, 5, 5}, "ngram");
  CHECK(list(chain.parents()) == (Ints{-1, 0, 1, 2}));
  CHECK(list(chain.depths()) == (Ints{1, 2, 3, 4}));
  CHECK_EQ(chain.max_depth(), 4);
  CHECK_EQ(chain.source(), "ngram");
  for (std::int32_t i = -1; i < 3; ++i) CHECK_EQ(chain.child(i, 5), i + 1);
  CHECK_EQ(chain.child(3, 5), -2);
  check_lengths(chain);
}

TEST(draft_tree_single_node_and_empty) {
  const DraftTree one({0}, {-1}, {-0.5f});
  CHECK_EQ(one.max_depth(), 1);
  CHECK_EQ(one.log_probs()[0], -0.5f);
  CHECK(one.has_children(DraftTree::kRoot));

  for (const DraftTree& none : {DraftTree(), DraftTree({}, {}), DraftTree::chain({})}) {
    CHECK(none.empty());
    CHECK_EQ(none.max_depth(), 0);
    CHECK_EQ(none.child(DraftTree::kRoot, 0), -2);
    CHECK(!none.has_children(DraftTree::kRoot));
    none.check_vocabulary(1);
  }
}

TEST(draft_tree_refuses_bad_parents) {
  CHECK_THROWS(DraftTree({1, 2}, {-1, 2}), InvalidArgument, "[parents] expected an earlier node");
  CHECK_THROWS(DraftTree({1, 2}, {-1, 1}), InvalidArgument, "got 1 for node 1");
  CHECK_THROWS(DraftTree({1, 2}, {1, -1}), InvalidArgument, "[parents]");
  CHECK_THROWS(DraftTree({1, 2}, {-1, -2}), InvalidArgument, "[parents]");
  CHECK_THROWS(DraftTree({1}, {0}), InvalidArgument, "[parents]");
  CHECK_THROWS(DraftTree({1, 2}, {-1}), InvalidArgument, "[parents] expected 2 values");
  CHECK_THROWS(DraftTree({1}, {-1, 0}), InvalidArgument, "got 2");
}

TEST(draft_tree_refuses_duplicates) {
  CHECK_THROWS(DraftTree({3, 3}, {-1, -1}), InvalidArgument, "token 3 twice under node -1");
  CHECK_THROWS(DraftTree({1, 3, 4, 3}, {-1, 0, 0, 0}), InvalidArgument, "under node 0");
  CHECK_EQ(DraftTree({1, 2, 3, 3}, {-1, -1, 0, 1}).size(), 4u);  // cousins may be alike
}

TEST(draft_tree_refuses_bad_values) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_THROWS(DraftTree({-1}, {-1}), InvalidArgument, "[tokens] expected ids >= 0");
  CHECK_THROWS(DraftTree({1}, {-1}, {nan}), InvalidArgument, "[log_probs]");
  CHECK_THROWS(DraftTree({1, 2}, {-1, 0}, {0.0f}), InvalidArgument, "[log_probs] expected none or");
  CHECK_EQ(DraftTree({1}, {-1}, {-infinity}).size(), 1u);
}

TEST(draft_tree_add_checks_and_leaves_the_tree_alone) {
  DraftTree tree = sample();
  CHECK_THROWS(tree.add(7, DraftTree::kRoot), InvalidArgument, "siblings that differ");
  CHECK_THROWS(tree.add(9, 0), InvalidArgument, "token 9 twice under node 0");
  CHECK_THROWS(tree.add(1, 6), InvalidArgument, "[parents]");
  CHECK_THROWS(tree.add(1, -2), InvalidArgument, "[parents]");
  CHECK_THROWS(tree.add(-5, 0), InvalidArgument, "[tokens]");
  CHECK_THROWS(tree.add(1, 0, std::nanf("")), InvalidArgument, "[log_probs]");
  CHECK_EQ(tree.size(), 6u);
  check_lengths(tree);
  CHECK_EQ(tree.add(9, 5, -1.5f), 6);
  CHECK_EQ(tree.depths()[6], 4);
  CHECK_EQ(tree.log_probs()[6], -1.5f);
  CHECK_EQ(tree.max_depth(), 4);
}

TEST(draft_tree_child) {
  const DraftTree tree = sample();
  CHECK_EQ(tree.child(DraftTree::kRoot, 7), 0);
  CHECK_EQ(tree.child(DraftTree::kRoot, 8), 1);
  CHECK_EQ(tree.child(0, 7), 2);
  CHECK_EQ(tree.child(0, 9), 3);
  CHECK_EQ(tree.child(1, 7), 4);
  CHECK_EQ(tree.child(3, 1), 5);
  CHECK_EQ(tree.child(0, 8), -2);
  CHECK_EQ(tree.child(5, 1), -2);
  for (const std::int32_t outside : {-3, -2, 6, std::numeric_limits<std::int32_t>::max()}) {
    CHECK_EQ(tree.child(outside, 7), -2);
    CHECK(!tree.has_children(outside));
  }
  CHECK(tree.has_children(3) && !tree.has_children(2) && !tree.has_children(5));
}

TEST(draft_tree_prune) {
  DraftTree tree = sample();
  CHECK(!tree.prune(3, 6));
  CHECK(tree.prune(2, 100));
  CHECK(list(tree.tokens()) == (Ints{7, 8, 7, 9, 7}));
  CHECK(tree.prune(5, 3));
  CHECK(list(tree.tokens()) == (Ints{7, 8, 7}));
  CHECK(list(tree.parents()) == (Ints{-1, -1, 0}));
  CHECK(tree.prune(0, 3));
  CHECK(tree.empty());
  CHECK(!tree.prune(0, 0));

  tree = sample();
  CHECK(tree.prune(3, 0));
  CHECK(tree.empty());
  tree = sample();
  CHECK(tree.prune(-1, -1));
  CHECK(tree.empty());

  // Depth first, so that nodes that go anyway do not count.
  DraftTree deep({1, 2, 3, 4, 5}, {-1, 0, 1, -1, 3}, {-1, -2, -3, -4, -5});
  CHECK(deep.prune(2, 3));
  CHECK(list(deep.tokens()) == (Ints{1, 2, 4}));
  CHECK(list(deep.parents()) == (Ints{-1, 0, -1}));
  CHECK_EQ(deep.log_probs()[2], -4.0f);
}

// Whatever is left after pruning is a valid tree whose nodes spell the same paths as before.
TEST(draft_tree_prune_random) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    DraftTree tree;
    while (tree.size() < 40) {
      const auto parent = static_cast<std::int32_t>(random() % (tree.size() + 1)) - 1;
      const auto token = static_cast<TokenId>(random() % 50);
      if (tree.child(parent, token) < 0) tree.add(token, parent, -static_cast<float>(tree.size()));
    }
    const auto path = [](const DraftTree& of, std::int32_t node) {
      Ints tokens;
      for (; node != DraftTree::kRoot; node = of.parents()[node]) {
        tokens.push_back(of.tokens()[node]);
      }
      return tokens;
    };
    const auto depth = static_cast<std::int32_t>(random() % 8);
    const std::size_t nodes = random() % 40;
    std::vector<Ints> expected;
    for (std::int32_t i = 0; i < 40 && expected.size() < nodes; ++i) {
      if (tree.depths()[i] <= depth) expected.push_back(path(tree, i));
    }
    const TokenId* memory = tree.tokens().data();
    tree.prune(depth, static_cast<std::int64_t>(nodes));
    CHECK_EQ(tree.tokens().data(), memory);
    CHECK_EQ(tree.size(), expected.size());
    check_lengths(tree);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto node = static_cast<std::int32_t>(i);
      CHECK(path(tree, node) == expected[i]);
      CHECK_EQ(static_cast<std::size_t>(tree.depths()[i]), expected[i].size());
    }
  }
}

TEST(draft_tree_clear_keeps_its_memory) {
  DraftTree tree = sample();
  const TokenId* memory = tree.tokens().data();
  tree.clear();
  CHECK(tree.empty());
  for (std::int32_t i = 0; i < 6; ++i) tree.add(i, DraftTree::kRoot);
  CHECK_EQ(tree.tokens().data(), memory);
}

TEST(draft_tree_checks_the_vocabulary) {
  sample().check_vocabulary(10);
  CHECK_THROWS(sample().check_vocabulary(9), InvalidArgument,
               "[tokens] expected ids in [0, 9), got 9");
}
