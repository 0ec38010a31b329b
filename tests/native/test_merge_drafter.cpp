#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "specrt/error.h"
#include "specrt/merge.h"

namespace {

using specrt::Drafter;
using specrt::DraftRequest;
using specrt::DraftTree;
using specrt::SamplingParams;
using specrt::SequenceId;
using specrt::TokenId;
using Text = std::vector<TokenId>;

/// Drafts what it is told to, at a stated cost, and notes what it was asked.
class Part final : public Drafter {
 public:
  using Fill = std::function<void(const DraftRequest&, DraftTree&)>;
  Part(std::string name, double cost, Fill fill)
      : name_(std::move(name)), cost_(cost), fill_(std::move(fill)) {}

  const std::string& name() const override { return name_; }
  void admit(SequenceId id, std::span<const TokenId>, std::int64_t) override {
    if (refuses) throw specrt::CapacityError("[part] expected room, got none");
    ++open[id];
  }
  void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) override {
    ++calls;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      asked.push_back(requests[i].max_nodes);
      depths.push_back(requests[i].max_depth);
      greedy = requests[i].sampling == nullptr || requests[i].sampling->greedy();
      fill_(requests[i], out[i]);
    }
  }
  void observe(SequenceId, std::span<const TokenId> tokens) override {
    heard.insert(heard.end(), tokens.begin(), tokens.end());
  }
  void release(SequenceId id) override { open.erase(id); }
  specrt::MemoryUse memory() const override { return {1, 2, 3, 4}; }
  double step_cost(std::int64_t) const override { return cost_; }

  int calls = 0;
  bool refuses = false;
  bool greedy = false;
  std::vector<std::int64_t> asked;
  std::vector<std::int64_t> depths;
  Text heard;
  std::map<SequenceId, int> open;

 private:
  std::string name_;
  double cost_;
  Fill fill_;
};

std::shared_ptr<Part> chain(const std::string& name, double cost, const Text& tokens) {
  return std::make_shared<Part>(name, cost, [tokens](const DraftRequest& request, DraftTree& tree) {
    const auto most = std::min(request.max_nodes, request.max_depth);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(most, std::ssize(tokens)); ++i) {
      tree.add(tokens[static_cast<std::size_t>(i)], static_cast<std::int32_t>(i) - 1);
    }
  });
}

DraftTree draft(Drafter& drafter, std::int64_t nodes, const SamplingParams* params = nullptr) {
  static const Text text{1, 2, 3};
  DraftTree tree;
  const DraftRequest request{1, text, nodes, 100, params};
  drafter.propose({&request, 1}, {&tree, 1});
  return tree;
}

Text tokens_of(const DraftTree& tree) { return {tree.tokens().begin(), tree.tokens().end()}; }

std::shared_ptr<Drafter> merge(std::vector<std::shared_ptr<Drafter>> parts) {
  const auto merged = specrt::make_merge_drafter({std::move(parts), 1000});
  merged->admit(1, Text{1, 2, 3}, 1000);
  return merged;
}

}  // namespace

TEST(merge_joins_by_prefix_and_credits_both) {
  const auto a = chain("a", 0.0, {10, 11, 12});
  const auto b = chain("b", 0.0, {10, 21, 22});
  const auto merged = merge({a, b});
  const DraftTree tree = draft(*merged, 8);
  CHECK(tokens_of(tree) == (Text{10, 11, 12, 21, 22}));
  CHECK_EQ(tree.parents()[3], 0);
  CHECK_EQ(tree.source(), "merge");
  CHECK_EQ(tree.sources().size(), 2u);
  CHECK_EQ(tree.sources()[1], "b");
  const std::vector<std::uint32_t> expected{3, 1, 1, 2, 2};
  for (std::int32_t i = 0; i < 5; ++i) CHECK_EQ(tree.sources_of(i), expected[i]);
  // Siblings exclude each other: half each where both were always right so far.
  CHECK_NEAR(std::exp(tree.log_probs()[0]), 1.0, 1e-6);
  CHECK_NEAR(std::exp(tree.log_probs()[1]), 0.5, 1e-6);
  merged->observe(1, Text{10, 21, 5});
  CHECK(a->heard == (Text{10, 21, 5}));
}

// Who has been wrong ranks behind who has been right, and under a small budget drafts nothing.
TEST(merge_ranks_by_what_became_of_the_drafts) {
  const auto wrong = chain("wrong", 0.0, {90, 91, 92, 93});
  const auto right = chain("right", 0.0, {10, 11, 12, 13});
  const auto merged = merge({wrong, right});
  CHECK(tokens_of(draft(*merged, 2)) == (Text{90, 10}));  // nothing is known: by turns
  for (int round = 0; round < 12; ++round) {
    draft(*merged, 8);
    merged->observe(1, Text{10, 11, 12, 13, 5});
  }
  CHECK(tokens_of(draft(*merged, 4)) == (Text{10, 11, 12, 13}));
  const DraftTree tree = draft(*merged, 5);
  CHECK_EQ(tree.size(), 5u);
  CHECK(std::exp(tree.log_probs()[0]) < 0.35);  // 90: found first, listed first
  // The text turns: it takes a while, then the other one leads.
  for (int round = 0; round < 30; ++round) {
    draft(*merged, 8);
    merged->observe(1, Text{90, 91, 92, 93, 5});
  }
  CHECK(tokens_of(draft(*merged, 4)) == (Text{90, 91, 92, 93}));
}

// Confidence tells a source's good drafts from its bad ones.
TEST(merge_calibrates_confidence) {
  int round = 0;
  const auto sure = std::make_shared<Part>("sure", 0.0, [&](const DraftRequest&, DraftTree& tree) {
    const bool confident = round % 2 == 0;
    tree.add(10, -1, std::log(confident ? 0.95f : 0.3f));
  });
  const auto steady = chain("steady", 0.0, {20});
  const auto merged = merge({sure, steady});
  for (; round < 80; ++round) {
    draft(*merged, 4);
    const bool right = round % 2 == 0;
    merged->observe(1, right ? Text{10, 5} : round % 4 == 1 ? Text{20, 5} : Text{30});
  }
  round = 0;
  CHECK(tokens_of(draft(*merged, 1)) == Text{10});
  round = 1;
  CHECK(tokens_of(draft(*merged, 1)) == Text{20});
}

// A part that costs is not asked while the cheap one fills the budget with near-certain nodes, and
// is once that fails.
TEST(merge_skips_a_part_that_adds_nothing) {
  const auto dear = chain("dear", 0.3, {10, 11, 12, 13, 14, 15, 16, 17});
  bool finds = true;
  const auto cheap = std::make_shared<Part>("cheap", 0.0, [&](const DraftRequest& r, DraftTree& t) {
    if (!finds) return;
    for (std::int32_t i = 0; i < r.max_nodes; ++i) t.add(50 + i, i - 1);
  });
  const auto merged = merge({dear, cheap});  // cheap first, whatever the order
  const auto round = [&](const Text& text) {
    const DraftTree tree = draft(*merged, 8);
    merged->observe(1, text);
    return tree;
  };
  for (int i = 0; i < 20; ++i) round({50, 51, 52, 53, 54, 55, 56, 57, 5});
  CHECK_EQ(dear->calls, 0);
  CHECK_EQ(cheap->calls, 20);
  finds = false;
  const DraftTree alone = round({10, 11, 12, 13, 14, 15, 16, 17, 5});
  CHECK_EQ(dear->calls, 1);
  CHECK_EQ(alone.size(), 8u);
  // Where the dear one fails as well, it is left alone, but for probes.
  for (int i = 0; i < 200; ++i) round({7});
  CHECK(dear->calls > 2);
  CHECK(dear->calls < 20);
}

// Deeper than it pays is not asked for.
TEST(merge_asks_for_the_depth_that_pays) {
  const auto dear = chain("dear", 0.4, {10, 11, 12, 13, 14, 15, 16, 17});
  const auto merged = merge({dear});
  for (int i = 0; i < 60; ++i) {
    draft(*merged, 8);
    merged->observe(1, Text{10, 11, 5});  // two are right, always
  }
  CHECK(dear->depths.back() >= 2);
  CHECK(dear->depths.back() <= 3);
}

// Where a draft has a say in the text, parts pick; what was sampled all the same is refused.
TEST(merge_of_sampled_drafts) {
  SamplingParams params;
  params.temperature = 1.0f;
  const auto picking = chain("picking", 0.0, {10, 11});
  const auto merged = merge({picking, chain("other", 0.0, {20, 21, 22})});
  draft(*merged, 8, &params);
  CHECK(!picking->greedy);  // coupled: the target's own noise is there to be read
  params.verification = specrt::Verification::rejection;
  CHECK_EQ(draft(*merged, 8, &params).size(), 5u);
  CHECK(picking->greedy);
  params.verification = specrt::Verification::block;
  const DraftTree tree = draft(*merged, 8, &params);
  CHECK(tokens_of(tree) == (Text{10, 11}));  // a chain
  const auto sampling = std::make_shared<Part>("mine", 0.0, [](const DraftRequest&, DraftTree& t) {
    t.set_draw(specrt::Draw::without_replacement);
    t.add(1, -1);
    t.set_distribution(-1, std::vector<float>{0.5f, 0.5f});
  });
  const auto refused = merge({picking, sampling});
  CHECK_THROWS(draft(*refused, 8, &params), specrt::InvalidArgument, "mine");
}

TEST(merge_keeps_its_parts_in_step) {
  const auto a = chain("same", 0.0, {10});
  const auto b = chain("same", 0.0, {20});
  const auto merged = specrt::make_merge_drafter({{a, b}, 1000});
  b->refuses = true;
  CHECK_THROWS(merged->admit(1, Text{1}, 10), specrt::CapacityError, "room");
  CHECK(a->open.empty());
  b->refuses = false;
  merged->admit(1, Text{1}, 10);
  CHECK_THROWS(merged->admit(1, Text{1}, 10), specrt::InvalidArgument, "in use");
  CHECK_EQ(draft(*merged, 4).sources()[1], "same#2");
  CHECK_EQ(merged->memory().weights, 2);
  CHECK_EQ(merged->memory().kv_cache, 4);
  merged->release(1);
  CHECK(a->open.empty());
  CHECK(b->open.empty());
  CHECK_THROWS(merged->release(1), specrt::InvalidArgument, "admitted");
  const auto failing = std::make_shared<Part>(
      "bad", 0.0, [](const DraftRequest&, DraftTree&) { throw std::runtime_error("no idea"); });
  const auto broken = merge({a, failing});
  CHECK_THROWS(draft(*broken, 4), specrt::InvalidArgument, "bad: no idea");
  CHECK_THROWS(specrt::make_merge_drafter({{}, 1000}), specrt::InvalidArgument, "parts");
  CHECK_THROWS(specrt::make_merge_drafter({{nullptr}, 1000}), specrt::InvalidArgument, "parts");
  CHECK_THROWS(specrt::make_merge_drafter({{a, a}, 1000}), specrt::InvalidArgument, "once");
  CHECK_THROWS(specrt::make_merge_drafter({{a}, 0}), specrt::InvalidArgument, "target_bytes");
}
