#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/suffix_trie.h"
#include "specrt/error.h"
#include "specrt/suffix.h"

namespace {

using specrt::Drafter;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::SamplingParams;
using specrt::SuffixCache;
using specrt::SuffixOptions;
using specrt::TokenId;
using Text = std::vector<TokenId>;

DraftTree draft(Drafter& drafter, specrt::SequenceId id, const Text& text, std::int64_t nodes,
                std::int64_t depth = 100, const SamplingParams* params = nullptr) {
  DraftTree tree;
  const DraftRequest request{id, text, nodes, depth, params};
  drafter.propose({&request, 1}, {&tree, 1});
  CHECK_EQ(tree.source(), "suffix");
  return tree;
}

Text tokens_of(const DraftTree& tree) { return {tree.tokens().begin(), tree.tokens().end()}; }

}  // namespace

TEST(suffix_drafter_copies_its_own_text) {
  const auto drafter = specrt::make_suffix_drafter();
  const Text text{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3};
  drafter->admit(1, text, 50);
  CHECK(tokens_of(draft(*drafter, 1, text, 4)) == (Text{4, 5, 6, 7}));  // never more than asked for
  CHECK(tokens_of(draft(*drafter, 1, text, 4, 2)) == (Text{4, 5}));
  CHECK(draft(*drafter, 1, text, 0).empty());
  const DraftTree tree = draft(*drafter, 1, text, 3);
  CHECK_NEAR(tree.log_probs()[0], std::log(0.5), 1e-6);  // the text's own end counts too
  CHECK_NEAR(tree.log_probs()[1], 0.0, 1e-6);
  // What it was not told it learns from the request.
  Text longer = text;
  for (const TokenId token : {4, 5, 20, 21, 4, 5}) longer.push_back(token);
  CHECK(tokens_of(draft(*drafter, 1, longer, 2)) == (Text{20, 21}));
  drafter->observe(1, Text{20});
  longer.push_back(20);
  CHECK(tokens_of(draft(*drafter, 1, longer, 2)) == (Text{21, 4}));
  longer[18] = 9;
  CHECK_THROWS(draft(*drafter, 1, longer, 2), specrt::InternalError, "as observed at 18");
  drafter->release(1);
  CHECK_THROWS(drafter->release(1), specrt::InvalidArgument, "admitted");
  CHECK_EQ(drafter->memory().total(), 0);
}

// A match of m tokens drafts m * factor + offset.
TEST(suffix_drafter_options_are_honoured) {
  Text text;
  for (TokenId i = 0; i < 20; ++i) text.push_back(i);
  for (TokenId i = 0; i < 3; ++i) text.push_back(i);
  const auto length = [&](const SuffixOptions& options) {
    const auto drafter = specrt::make_suffix_drafter(options);
    drafter->admit(1, text, 50);
    return draft(*drafter, 1, text, 100).size();
  };
  SuffixOptions options;
  options.max_spec_factor = 1.0;
  CHECK_EQ(length(options), 3u);
  options.max_spec_factor = 2.5;
  CHECK_EQ(length(options), 7u);
  options.max_spec_offset = 1.0;
  CHECK_EQ(length(options), 8u);
  options.max_spec_factor = 0.0;
  CHECK_EQ(length(options), 1u);
  options.max_spec_factor = 100.0;
  options.max_tree_depth = 10;  // of which a match takes its part: one token leaves nine
  CHECK_EQ(length(options), 9u);
  options.min_token_prob = 0.6;  // one of two continuations of the end
  CHECK_EQ(length(options), 0u);
}

TEST(suffix_drafter_refuses_options) {
  const auto refused = [](auto set, const char* what) {
    SuffixOptions options;
    set(options);
    CHECK_THROWS(specrt::make_suffix_drafter(options), specrt::InvalidArgument, what);
  };
  refused([](SuffixOptions& o) { o.max_tree_depth = 0; }, "max_tree_depth");
  refused([](SuffixOptions& o) { o.max_tree_depth = 5000; }, "max_tree_depth");
  refused([](SuffixOptions& o) { o.max_spec_factor = -1.0; }, "max_spec_factor");
  refused([](SuffixOptions& o) { o.max_spec_factor = std::nan(""); }, "max_spec_factor");
  refused([](SuffixOptions& o) { o.max_spec_offset = INFINITY; }, "max_spec_offset");
  refused([](SuffixOptions& o) { o.min_token_prob = 1.5; }, "min_token_prob");
  refused([](SuffixOptions& o) { o.cache = std::make_shared<SuffixCache>(8, 1, 1); }, "cache");
  CHECK_THROWS(SuffixCache(8, -1, 10), specrt::InvalidArgument, "max_cached_requests");
  CHECK_THROWS(SuffixCache(8, 10, -1), specrt::InvalidArgument, "max_cached_tokens");
}

// Branches under one budget, children behind their parents.
TEST(suffix_drafter_draws_trees) {
  SuffixOptions options;
  options.use_tree_spec = true;
  const auto drafter = specrt::make_suffix_drafter(options);
  const Text text{1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2};
  drafter->admit(1, text, 50);
  const DraftTree tree = draft(*drafter, 1, text, 4);
  CHECK(tokens_of(tree) == (Text{3, 4, 7, 9}));
  CHECK_EQ(tree.parents()[2], 0);
  CHECK_NEAR(tree.log_probs()[2], std::log(0.5), 1e-6);
  SamplingParams block;
  block.temperature = 1.0f;
  block.verification = specrt::Verification::block;  // which takes chains
  CHECK(tokens_of(draft(*drafter, 1, text, 4, 100, &block)) == (Text{3, 7, 1, 2}));
}

// A response helps the next request, its last tokens too; the own text comes first where it is as
// good.
TEST(suffix_drafter_shares_responses) {
  SuffixOptions options;
  options.cache = std::make_shared<SuffixCache>(24, 10, 1000);
  const auto drafter = specrt::make_suffix_drafter(options);
  const Text prompt{50, 51};
  drafter->admit(1, prompt, 50);
  Text text = prompt;
  for (TokenId i = 1; i < 9; ++i) text.push_back(i);
  drafter->observe(1, Text{1, 2, 3});
  drafter->finished(1, text);
  drafter->release(1);
  CHECK_EQ(options.cache->requests(), 1);
  CHECK_EQ(options.cache->tokens(), 8);  // the response, not the prompt

  const Text other{60, 5, 6};
  drafter->admit(2, other, 50);
  CHECK(tokens_of(draft(*drafter, 2, other, 8)) == (Text{7, 8}));
  // Where a draft has a say in the text, others' texts have none.
  SamplingParams params;
  params.temperature = 1.0f;
  CHECK(tokens_of(draft(*drafter, 2, other, 8, 100, &params)) == (Text{7, 8}));
  for (const auto kind : {specrt::Verification::rejection, specrt::Verification::block}) {
    params.verification = kind;
    CHECK(draft(*drafter, 2, other, 8, 100, &params).empty());
  }
  params.temperature = 0.0f;
  CHECK(tokens_of(draft(*drafter, 2, other, 8, 100, &params)) == (Text{7, 8}));
  drafter->release(2);
  CHECK_EQ(options.cache->requests(), 1);  // no response, nothing to keep

  // The own text says 5 6 -> 9 once in two; the cache says 5 6 -> 7 always: the better score.
  const Text third{5, 6, 9, 9, 5, 6};
  drafter->admit(3, third, 50);
  CHECK(tokens_of(draft(*drafter, 3, third, 1)) == (Text{7}));
  drafter->release(3);
  // Equal scores: the own text's.
  options.cache->add(Text{70, 71, 72, 70, 73});
  const Text fourth{70, 74, 70};
  drafter->admit(4, fourth, 50);
  CHECK(tokens_of(draft(*drafter, 4, fourth, 1)) == (Text{74}));
  drafter->release(4);
}

TEST(suffix_cache_keeps_its_bounds) {
  SuffixCache cache(8, 3, 40);
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    Text response(random() % 60);
    for (TokenId& token : response) token = static_cast<TokenId>(random() % 5);
    cache.add(response);
    CHECK(cache.requests() <= 3);
    CHECK(cache.tokens() <= 40);
    CHECK(cache.bytes() <= cache.max_bytes());
    cache.check_invariants();
  }
  SuffixCache none(8, 0, 40);
  none.add(Text{1, 2, 3});
  CHECK_EQ(none.tokens(), 0);
  SuffixCache end(8, 5, 4);
  end.add(Text{1, 2, 3, 4, 5, 6});  // the end of what does not fit
  CHECK_EQ(end.tokens(), 4);
  SuffixOptions options;
  options.max_tree_depth = 8;
  options.cache = std::make_shared<SuffixCache>(8, 5, 4);
  options.cache->add(Text{1, 2, 3, 4, 5, 6});
  const auto drafter = specrt::make_suffix_drafter(options);
  const Text prompt{3};
  drafter->admit(1, prompt, 10);
  CHECK(tokens_of(draft(*drafter, 1, prompt, 8)) == (Text{4, 5, 6}));
  cache.set_vocabulary(100);
  cache.set_vocabulary(100);
  CHECK_THROWS(cache.set_vocabulary(99), specrt::InvalidArgument, "suffix cache");
}

// Drafters of several threads share a cache: each finds something, and nothing breaks.
TEST(suffix_cache_from_several_threads) {
  const auto cache = std::make_shared<SuffixCache>(12, 50, 3000);
  std::vector<std::thread> threads;
  std::vector<std::int64_t> drafted(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      SuffixOptions options;
      options.max_tree_depth = 12;
      options.cache = cache;
      const auto drafter = specrt::make_suffix_drafter(options);
      for (int request = 0; request < 150; ++request) {
        Text text{static_cast<TokenId>(request % 7)};
        drafter->admit(request, text, 200);
        for (int round = 0; round < 20; ++round) {
          drafted[static_cast<std::size_t>(t)] +=
              static_cast<std::int64_t>(draft(*drafter, request, text, 6).size());
          const Text more{static_cast<TokenId>((request + round) % 7),
                          static_cast<TokenId>(round % 5)};
          drafter->observe(request, more);
          text.insert(text.end(), more.begin(), more.end());
        }
        drafter->release(request);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  cache->check_invariants();
  CHECK_EQ(cache->requests(), 50);
  for (const std::int64_t count : drafted) CHECK(count > 1000);
}
