#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "core/suffix_index.h"
#include "specrt/drafter.h"
#include "specrt/error.h"

namespace {

using specrt::Drafter;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::NgramOptions;
using specrt::TokenId;
using Text = std::vector<TokenId>;

constexpr std::int64_t kRoom = 1 << 20;

Text draft(Drafter& drafter, specrt::SequenceId id, const Text& text, std::int64_t nodes,
           std::int64_t depth = kRoom) {
  DraftTree tree;
  const DraftRequest request{id, text, nodes, depth, nullptr};
  drafter.propose({&request, 1}, {&tree, 1});
  CHECK_EQ(tree.source(), "ngram");
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(tree.size()); ++i) {
    CHECK_EQ(tree.parents()[i], i - 1);
  }
  return {tree.tokens().begin(), tree.tokens().end()};
}

Text draft_once(const NgramOptions& options, const Text& text, std::int64_t nodes,
                std::int64_t depth = kRoom) {
  const auto drafter = specrt::make_ngram_drafter(options);
  drafter->admit(1, text, std::ssize(text));
  return draft(*drafter, 1, text, nodes, depth);
}

}  // namespace

// The longest match wins, and max_match decides how long it may be.
TEST(ngram_max_match_is_honoured) {
  const Text text{1, 2, 3, 40, 9, 3, 50, 8, 1, 2, 3};
  CHECK(draft_once({1, 1}, text, 1) == Text{50});
  CHECK(draft_once({1, 2}, text, 1) == Text{40});
  CHECK(draft_once({1, 3}, text, 3) == (Text{40, 9, 3}));
  CHECK(draft_once({3, 3}, text, 1) == Text{40});
  CHECK(draft_once({3, 10}, text, 1) == Text{40});
}

TEST(ngram_min_match_is_honoured) {
  const Text text{1, 2, 3, 40, 9, 3, 50, 8, 1, 2, 3};
  CHECK(draft_once({4, 10}, text, 3).empty());
  const Text single{7, 5, 6, 7};
  CHECK(draft_once({1, 4}, single, 2) == (Text{5, 6}));
  CHECK(draft_once({2, 4}, single, 2).empty());
}

TEST(ngram_most_recent_or_earliest) {
  const Text text{1, 2, 30, 1, 2, 40, 1, 2};
  CHECK(draft_once({1, 4, true}, text, 1) == Text{40});
  CHECK(draft_once({1, 4, false}, text, 1) == Text{30});
}

TEST(ngram_no_match_no_draft) {
  CHECK(draft_once({1, 4}, {1, 2, 3}, 5).empty());
  CHECK(draft_once({1, 4}, {1}, 5).empty());
  CHECK(draft_once({1, 4}, {}, 5).empty());
}

// Past the end of the text the copy goes on into itself.
TEST(ngram_continues_a_period) {
  CHECK(draft_once({1, 4}, {5, 5}, 4) == (Text{5, 5, 5, 5}));
  CHECK(draft_once({2, 4}, {1, 2, 3, 1, 2}, 8) == (Text{3, 1, 2, 3, 1, 2, 3, 1}));
}

// Only what can be used is drafted, at every budget, and every node is a token of the text.
TEST(ngram_budgets) {
  Text text;
  for (int i = 0; i < 300; ++i) text.push_back(i % 7 + 10);
  for (std::int64_t nodes = 0; nodes <= 17; ++nodes) {
    for (const std::int64_t depth : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4}, kRoom}) {
      const Text drafted = draft_once({1, 8}, text, nodes, depth);
      CHECK_EQ(std::ssize(drafted), std::min(nodes, depth));
      for (std::size_t i = 0; i < drafted.size(); ++i) {
        CHECK_EQ(drafted[i], static_cast<TokenId>((text.size() + i) % 7 + 10));
      }
    }
  }
  CHECK(draft_once({1, 8}, text, -1).empty());
}

TEST(ngram_observes_what_is_committed) {
  std::mt19937 random(6);
  Text text(40);
  for (TokenId& token : text) token = static_cast<TokenId>(random() % 3);
  const auto drafter = specrt::make_ngram_drafter({1, 5});
  drafter->admit(3, text, 400);
  drafter->admit(4, text, 400);  // observes nothing, and catches up when asked
  while (text.size() < 390) {
    Text committed(1 + random() % 5);
    for (TokenId& token : committed) token = static_cast<TokenId>(random() % 3);
    drafter->observe(3, committed);
    text.insert(text.end(), committed.begin(), committed.end());
    const Text expected = draft_once({1, 5}, text, 6);
    CHECK(draft(*drafter, 3, text, 6) == expected);
    CHECK(draft(*drafter, 4, text, 6) == expected);
    CHECK(draft(*drafter, 3, text, 6) == expected);  // proposing changes nothing
  }
}

TEST(ngram_sequences_are_apart) {
  const auto drafter = specrt::make_ngram_drafter({1, 4});
  const Text first{1, 2, 1};
  const Text second{1, 3, 1};
  drafter->admit(10, first, 8);
  drafter->admit(-11, second, 8);
  const DraftRequest requests[] = {{-11, second, 1, 1, nullptr}, {10, first, 1, 1, nullptr}};
  std::vector<DraftTree> trees(2);
  drafter->propose(requests, trees);
  CHECK_EQ(trees[0].tokens()[0], 3);
  CHECK_EQ(trees[1].tokens()[0], 2);

  drafter->release(10);
  CHECK(draft(*drafter, -11, second, 1) == Text{3});
  drafter->admit(10, second, 8);
  CHECK(draft(*drafter, 10, second, 1) == Text{3});
}

TEST(ngram_memory_is_that_of_its_sequences) {
  const auto drafter = specrt::make_ngram_drafter();
  CHECK_EQ(drafter->memory().total(), 0);
  const Text text(1000, 4);
  drafter->admit(1, text, 1000);
  const std::int64_t one = drafter->memory().other;
  CHECK(one > 0 && one <= specrt::SuffixIndex::bytes_for(1000));
  drafter->admit(2, text, 1000);
  CHECK_EQ(drafter->memory().total(), 2 * one);
  drafter->release(1);
  drafter->release(2);
  CHECK_EQ(drafter->memory().total(), 0);
}

// A steady round writes into the memory that the tree has.
TEST(ngram_reuses_the_tree) {
  const auto drafter = specrt::make_ngram_drafter();
  const Text text(100, 4);
  drafter->admit(1, text, 100);
  DraftTree tree;
  const DraftRequest request{1, text, 16, 16, nullptr};
  drafter->propose({&request, 1}, {&tree, 1});
  const TokenId* memory = tree.tokens().data();
  const std::int64_t bytes = drafter->memory().other;
  for (int round = 0; round < 5; ++round) drafter->propose({&request, 1}, {&tree, 1});
  CHECK_EQ(tree.tokens().data(), memory);
  CHECK_EQ(tree.size(), 16u);
  CHECK_EQ(drafter->memory().other, bytes);
}

// Long histories, wide ranges, a batch of eight: what an observed token costs stays the same from
// the first to the last, and a proposal reads a stored match.
TEST(ngram_cost_does_not_grow_with_history) {
  std::mt19937 random(7);
  Text mixed(50000);
  for (TokenId& token : mixed) token = static_cast<TokenId>(random() % 3000);
  for (const Text& text : {mixed, Text(50000, 1)}) {
    specrt::SuffixIndex index(64, true, 50000);
    index.append(std::span(text).first(10000));
    const std::int64_t early = index.steps();
    index.append(std::span(text).subspan(10000, 30000));
    const std::int64_t before = index.steps();
    index.append(std::span(text).last(10000));
    CHECK(index.steps() - before <= 2 * early);
    const std::int64_t after = index.steps();
    (void)index.match();
    CHECK_EQ(index.steps(), after);
  }

  const auto drafter = specrt::make_ngram_drafter({1, 64});
  std::vector<DraftRequest> requests;
  std::vector<DraftTree> trees(8);
  for (specrt::SequenceId id = 0; id < 8; ++id) {
    drafter->admit(id, mixed, 50000);
    requests.push_back({id, mixed, 4, 4, nullptr});
  }
  drafter->propose(requests, trees);
  for (const DraftTree& tree : trees) CHECK_EQ(tree.size(), 4u);
}

TEST(ngram_refuses_bad_options) {
  using specrt::InvalidArgument;
  CHECK_THROWS(specrt::make_ngram_drafter({0, 4}), InvalidArgument,
               "[prompt_lookup_min] expected an integer >= 1, got 0");
  CHECK_THROWS(specrt::make_ngram_drafter({3, 2}), InvalidArgument,
               "[prompt_lookup_max] expected an integer >= prompt_lookup_min (3), got 2");
}

TEST(ngram_refuses_bad_calls) {
  using specrt::InvalidArgument;
  const auto drafter = specrt::make_ngram_drafter();
  CHECK_EQ(drafter->name(), "ngram");
  const Text text{1, 2, 1, 2};
  drafter->admit(5, text, 6);
  CHECK_THROWS(drafter->admit(5, text, 6), InvalidArgument, "[sequence] expected an id not in use");
  CHECK_THROWS(drafter->admit(6, text, 3), specrt::CapacityError, "at most 3 tokens, got 4");
  CHECK_THROWS(drafter->observe(6, text), InvalidArgument, "expected an admitted id, got 6");
  CHECK_THROWS(drafter->release(6), InvalidArgument, "got 6");
  CHECK_THROWS(draft(*drafter, 6, text, 1), InvalidArgument, "got 6");
  CHECK_THROWS(drafter->observe(5, text), specrt::CapacityError, "at most 6 tokens, got 8");
  CHECK_THROWS(draft(*drafter, 5, {1, 2, 1}, 1), specrt::InternalError, "at least the 4 tokens");
  CHECK_THROWS(draft(*drafter, 5, {1, 2, 1, 3}, 1), specrt::InternalError, "[tokens]");
  std::vector<DraftTree> trees(1);
  CHECK_THROWS(drafter->propose({}, trees), InvalidArgument, "[out] expected 0 trees, got 1");
  CHECK(draft(*drafter, 5, text, 2) == (Text{1, 2}));
}
