#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "decode/verify.h"

namespace {

using specrt::DraftTree;
using specrt::TokenId;
using specrt::TreeWalk;
using specrt::WalkEnd;
using Ints = std::vector<std::int32_t>;

struct Result {
  Ints emitted;
  Ints path;
  WalkEnd end;
};

// The target chooses choices[i] at the i-th node it comes to.
Result walk(const DraftTree& tree, const Ints& choices, std::int64_t limit, TokenId stop = -1) {
  TreeWalk out;
  out.start(limit);
  for (const TokenId choice : choices) {
    if (!out.running()) break;
    out.step(choice, tree.child(out.node(), choice), choice == stop);
  }
  return {out.emitted(), out.path(), out.end()};
}

// 0   1   2      tokens 5 6 7 under the root
// 3 4   5        8 9 under node 0, 5 under node 1
// 6              8 under node 4
DraftTree sample() { return DraftTree({5, 6, 7, 8, 9, 5, 8}, {-1, -1, -1, 0, 0, 1, 4}); }

}  // namespace

TEST(walk_without_a_draft_emits_one_token) {
  const DraftTree none;
  const Result result = walk(none, {3}, 10);
  CHECK(result.emitted == Ints{3});
  CHECK(result.path.empty());
  CHECK(result.end == WalkEnd::mismatch);
}

TEST(walk_of_a_chain) {
  const DraftTree chain = DraftTree::chain(Ints{1, 2, 3});
  Result result = walk(chain, {1, 2, 3, 4}, 10);
  CHECK(result.emitted == (Ints{1, 2, 3, 4}));
  CHECK(result.path == (Ints{0, 1, 2}));
  CHECK(result.end == WalkEnd::mismatch);
  result = walk(chain, {1, 9}, 10);
  CHECK(result.emitted == (Ints{1, 9}));
  CHECK(result.path == Ints{0});
  result = walk(chain, {2}, 10);  // right one token later is wrong
  CHECK(result.emitted == Ints{2});
  CHECK(result.path.empty());
}

TEST(walk_takes_any_sibling_and_only_the_chosen_one) {
  const DraftTree tree = sample();
  CHECK(walk(tree, {5, 9, 8, 0}, 10).path == (Ints{0, 4, 6}));
  CHECK(walk(tree, {6, 5, 0}, 10).path == (Ints{1, 5}));
  CHECK(walk(tree, {7, 5}, 10).path == Ints{2});
  CHECK(walk(tree, {5, 5}, 10).path == Ints{0});  // 5 is a child of node 1, not of node 0
  CHECK(walk(tree, {8}, 10).path.empty());
}

TEST(walk_says_which_node_decides_next) {
  const DraftTree tree = sample();
  TreeWalk out;
  out.start(10);
  CHECK_EQ(out.node(), DraftTree::kRoot);
  out.step(5, tree.child(out.node(), 5), false);
  CHECK_EQ(out.node(), 0);
  out.step(9, tree.child(out.node(), 9), false);
  CHECK_EQ(out.node(), 4);
  CHECK(out.running());
  out.step(1, tree.child(out.node(), 1), false);
  CHECK_EQ(out.node(), 4);
  CHECK(!out.running());
  out.start(1);  // starts afresh
  CHECK(out.running() && out.emitted().empty() && out.path().empty());
  CHECK_EQ(out.node(), DraftTree::kRoot);
}

TEST(walk_stops_at_every_index_of_an_accepted_run) {
  const DraftTree chain = DraftTree::chain(Ints{1, 2, 3, 4, 5, 6});
  for (TokenId stop = 1; stop <= 7; ++stop) {
    const Result result = walk(chain, {1, 2, 3, 4, 5, 6, 7}, 10, stop);
    CHECK_EQ(std::ssize(result.emitted), stop);
    CHECK_EQ(std::ssize(result.path), stop - 1);
    CHECK(result.end == WalkEnd::stop);
  }
}

TEST(walk_stop_goes_before_length) {
  const DraftTree chain = DraftTree::chain(Ints{1, 2, 3, 4});
  CHECK(walk(chain, {1, 2, 3}, 3, 3).end == WalkEnd::stop);
  CHECK(walk(chain, {1, 2, 3}, 3, 4).end == WalkEnd::length);
  CHECK(walk(chain, {1, 2, 3, 4}, 5, 2).end == WalkEnd::stop);
  const Result result = walk(chain, {1, 2, 3, 4}, 3, 4);
  CHECK(result.emitted == (Ints{1, 2, 3}));
  CHECK(result.path == (Ints{0, 1}));
}

// All but the last emitted token are the path's, whatever tree and choices.
TEST(walk_path_and_tokens_agree) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    DraftTree tree;
    const int size = static_cast<int>(random() % 12);
    while (static_cast<int>(tree.size()) < size) {
      const auto parent = static_cast<std::int32_t>(random() % (tree.size() + 1)) - 1;
      const auto token = static_cast<TokenId>(random() % 12);
      if (tree.child(parent, token) < 0) tree.add(token, parent);
    }
    const std::int64_t limit = 1 + random() % 6;
    const auto stop = static_cast<TokenId>(random() % 16);
    TreeWalk out;
    out.start(limit);
    while (out.running()) {
      const auto choice = static_cast<TokenId>(random() % 12);
      out.step(choice, tree.child(out.node(), choice), choice == stop);
    }
    CHECK_EQ(out.emitted().size(), out.path().size() + 1);
    CHECK(std::ssize(out.emitted()) <= limit);
    std::int32_t parent = DraftTree::kRoot;
    for (std::size_t i = 0; i < out.path().size(); ++i) {
      const auto node = static_cast<std::size_t>(out.path()[i]);
      CHECK_EQ(tree.parents()[node], parent);
      CHECK_EQ(tree.tokens()[node], out.emitted()[i]);
      CHECK(out.emitted()[i] != stop);
      parent = out.path()[i];
    }
    if (out.end() == WalkEnd::mismatch) CHECK_EQ(tree.child(parent, out.emitted().back()), -2);
    if (out.end() == WalkEnd::length) CHECK_EQ(std::ssize(out.emitted()), limit);
    CHECK_EQ(out.end() == WalkEnd::stop, out.emitted().back() == stop);
  }
}
