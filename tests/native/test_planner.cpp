#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "specrt/error.h"
#include "specrt/planner.h"

namespace {

using specrt::allocate_drafts;
using specrt::Allocation;
using specrt::CostModel;
using specrt::DraftCandidate;
using specrt::RoundCosts;

std::vector<double> chain_gains(double alpha, std::int64_t depth) {
  std::vector<double> out;
  double reached = 1.0;
  for (std::int64_t d = 0; d < depth; ++d) out.push_back(reached *= alpha);
  return out;
}

/// Passes of `base` + n rows, by seconds of a number of rows.
template <typename Cost>
std::vector<double> passes(std::int64_t base, std::int64_t most, const Cost& cost) {
  std::vector<double> out;
  for (std::int64_t n = 0; n <= most; ++n) out.push_back(cost(base + n));
  return out;
}

std::vector<double> free_drafts(std::int64_t depth) {
  return std::vector<double>(static_cast<std::size_t>(depth) + 1, 0.0);
}

/// Every way to give each candidate so many nodes.
Allocation by_enumeration(const std::vector<DraftCandidate>& all, const RoundCosts& costs) {
  std::vector<std::int64_t> nodes(all.size(), 0);
  Allocation best;
  double best_rate = -1.0;
  double plain = 0.0;
  for (;;) {
    std::int64_t total = 0;
    std::int64_t depth = 0;
    double tokens = static_cast<double>(all.size());
    double seconds = 0.0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      total += nodes[i];
      if (nodes[i] > 0) {
        depth = std::max(
            depth, static_cast<std::int64_t>(static_cast<double>(nodes[i] - 1) / all[i].width) + 1);
      }
      seconds += all[i].node_seconds * static_cast<double>(nodes[i]);
      for (std::int64_t k = 0; k < nodes[i]; ++k) tokens += all[i].gains[k];
    }
    seconds += costs.pass[total] + costs.draft[depth];
    const double rate = tokens / seconds;
    if (total == 0) plain = rate;
    if (rate > best_rate && (total == 0 || rate >= specrt::kLeastGain * plain)) {
      best_rate = rate;
      best = {nodes, tokens, seconds, 0};
    }
    std::size_t at = 0;
    while (at < nodes.size() && nodes[at] == std::ssize(all[at].gains)) nodes[at++] = 0;
    if (at == nodes.size()) return best;
    ++nodes[at];
  }
}

}  // namespace

TEST(planner_free_verification_takes_all) {
  const std::vector<double> gains = chain_gains(0.3, 7);
  const std::vector<double> pass(8, 1.0);
  const std::vector<double> draft = free_drafts(7);
  const DraftCandidate one{gains};
  const Allocation best = allocate_drafts(std::span(&one, 1), {pass, draft}, 0.0);
  CHECK_EQ(best.nodes[0], 7);
  CHECK_NEAR(best.tokens, 1.0 + std::accumulate(gains.begin(), gains.end(), 0.0), 1e-12);
}

// A step up at 17 rows: 4 sequences share 16 rows, and the last row stays unused where only half
// of a token would come for a pass twice as long.
TEST(planner_stops_at_the_edge_of_a_stair) {
  const std::vector<double> gains = chain_gains(0.9, 8);
  const std::vector<DraftCandidate> all(4, DraftCandidate{gains});
  const std::vector<double> pass =
      passes(4, 32, [](std::int64_t rows) { return rows <= 16 ? 1.0 : 3.0; });
  const std::vector<double> draft = free_drafts(8);
  const Allocation best = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(std::accumulate(best.nodes.begin(), best.nodes.end(), std::int64_t{0}), 12);
  for (const std::int64_t nodes : best.nodes) CHECK_EQ(nodes, 3);
}

// Beside prompts that take most of a pass every draft would look cheap; it still costs its own
// rows.
TEST(planner_weighs_drafts_by_the_time_that_prompts_leave) {
  const std::vector<double> gains = chain_gains(0.6, 4);
  const DraftCandidate one{gains};
  const std::vector<double> draft = free_drafts(4);
  const auto nodes = [&](double aside, double a_row) {
    const std::vector<double> pass =
        passes(1, 4, [&](std::int64_t rows) { return aside + 1.0 + a_row * (rows - 1); });
    return allocate_drafts(std::span(&one, 1), {pass, draft, 0.0, aside}, 0.0).nodes[0];
  };
  for (const double aside : {0.0, 9.0}) {
    CHECK_EQ(nodes(aside, 1.0), 0);
    CHECK(nodes(aside, 0.05) > 1);
  }
}

// One more node never pays, eight more do: who climbs from 0 stays there.
TEST(planner_finds_what_hill_climbing_does_not) {
  const std::vector<double> gains = chain_gains(0.95, 8);
  const DraftCandidate one{gains};
  const std::vector<double> pass =
      passes(1, 8, [](std::int64_t rows) { return rows == 1 ? 1.0 : 2.5; });
  const std::vector<double> draft = free_drafts(8);
  double tokens = 1.0;
  std::int64_t climbed = 0;
  while (climbed < 8 && (tokens + gains[climbed]) / pass[climbed + 1] > tokens / pass[climbed]) {
    tokens += gains[climbed++];
  }
  CHECK_EQ(climbed, 0);
  const Allocation best = allocate_drafts(std::span(&one, 1), {pass, draft}, 0.0);
  CHECK_EQ(best.nodes[0], 8);
  CHECK(best.tokens / best.seconds > 1.5);
}

TEST(planner_gives_rows_to_whom_they_help_most) {
  const std::vector<double> good = chain_gains(0.9, 6);
  const std::vector<double> bad = chain_gains(0.2, 6);
  const std::vector<DraftCandidate> all{{good}, {bad}, {good}};
  const std::vector<double> pass =
      passes(3, 18, [](std::int64_t rows) { return rows <= 8 ? 1.0 : 10.0; });
  const std::vector<double> draft = free_drafts(6);
  const Allocation best = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(best.nodes[1], 0);
  CHECK_EQ(best.nodes[0] + best.nodes[2], 5);
}

// A large batch is bound by arithmetic: each row costs what it costs alone.
TEST(planner_drafts_nothing_where_rows_cost_full_price) {
  const std::vector<double> gains = chain_gains(0.8, 5);
  const std::vector<DraftCandidate> all(64, DraftCandidate{gains});
  const std::vector<double> pass =
      passes(64, 320, [](std::int64_t rows) { return static_cast<double>(rows); });
  const std::vector<double> draft = free_drafts(5);
  const Allocation best = allocate_drafts(all, {pass, draft}, 0.0);
  for (const std::int64_t nodes : best.nodes) CHECK_EQ(nodes, 0);
  const DraftCandidate one{gains};
  const std::vector<double> few = passes(1, 5, [](std::int64_t) { return 1.0; });
  CHECK_EQ(allocate_drafts(std::span(&one, 1), {few, draft}, 0.0).nodes[0], 5);
}

// Drafting costs as much as a third of a pass for each token of depth.
TEST(planner_weighs_the_drafters_steps) {
  const std::vector<double> gains = chain_gains(0.6, 8);
  const DraftCandidate one{gains};
  const std::vector<double> pass(9, 1.0);
  std::vector<double> draft;
  for (int d = 0; d <= 8; ++d) draft.push_back(0.33 * d);
  const Allocation best = allocate_drafts(std::span(&one, 1), {pass, draft}, 0.0);
  CHECK_EQ(best.nodes[0], 1);  // 1.6 / 1.33 = 1.20, 1.96 / 1.66 = 1.18
}

TEST(planner_agrees_with_enumeration) {
  std::mt19937 random(3);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const std::size_t count = 1 + random() % 3;
    std::vector<std::vector<double>> gains(count);
    std::vector<DraftCandidate> all;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      double reached = 1.0;
      for (std::uint32_t d = 0; d <= random() % 4; ++d) {
        gains[i].push_back(reached *= uniform(0.1, 1.0));
      }
      most += std::ssize(gains[i]);
      DraftCandidate one{gains[i]};
      one.width = 1.0 + static_cast<double>(random() % 2);
      all.push_back(one);
    }
    std::vector<double> pass{1.0};
    for (std::int64_t n = 0; n < most; ++n) {
      pass.push_back(pass.back() + (random() % 3 == 0 ? uniform(0.0, 1.0) : 0.0));
    }
    std::vector<double> draft{0.0};
    for (int d = 0; d < 4; ++d) draft.push_back(draft.back() + uniform(0.0, 0.2));
    const RoundCosts costs{pass, draft};
    const Allocation expected = by_enumeration(all, costs);
    const Allocation got = allocate_drafts(all, costs, 0.0);
    CHECK_NEAR(got.tokens / got.seconds, expected.tokens / expected.seconds, 1e-9);
  }
}

// What planner.h says, looking at every depth and every total: what each needs of them, then what
// gains most; nothing is left out for not being worth a look.
static Allocation by_every_total(const std::vector<DraftCandidate>& all, const RoundCosts& costs) {
  const auto depth_of = [&](std::size_t i, std::int64_t place) {
    return static_cast<std::int64_t>(static_cast<double>(place) / all[i].width) + 1;
  };
  Allocation best;
  double best_rate = 0.0;
  double plain = 0.0;
  for (std::int64_t depth = 0; depth < std::ssize(costs.draft); ++depth) {
    for (std::int64_t n = 0; n < (depth == 0 ? 1 : std::ssize(costs.pass)); ++n) {
      Allocation one;
      one.seconds = costs.pass[n] + costs.draft[depth];
      one.missed = costs.limit_seconds > 0.0 && one.seconds > costs.limit_seconds ? 1 : 0;
      std::int64_t left = n;
      for (std::size_t i = 0; i < all.size(); ++i) {
        double tokens = all[i].tokens;
        std::int64_t nodes = 0;
        bool met = all[i].pace_seconds == 0.0;
        for (; !met; ++nodes) {
          met = tokens >= (one.seconds - costs.aside_seconds) / all[i].pace_seconds;
          if (met || nodes == std::ssize(all[i].gains) || depth_of(i, nodes) > depth) break;
          tokens += all[i].gains[nodes];
        }
        if (!met || nodes > left) {
          ++one.missed;
          nodes = 0;
        }
        one.nodes.push_back(nodes);
        left -= nodes;
      }
      for (; left > 0; --left) {
        std::size_t most = all.size();
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::int64_t next = one.nodes[i];
          if (next == std::ssize(all[i].gains) || depth_of(i, next) > depth) continue;
          if (most == all.size() || all[i].gains[next] > all[most].gains[one.nodes[most]]) most = i;
        }
        if (most == all.size()) break;
        ++one.nodes[most];
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        one.tokens += all[i].tokens;
        one.seconds += all[i].node_seconds * static_cast<double>(one.nodes[i]);
        for (std::int64_t k = 0; k < one.nodes[i]; ++k) one.tokens += all[i].gains[k];
      }
      const double rate = one.tokens / (one.seconds - costs.aside_seconds);
      if (depth == 0) plain = rate;
      const bool first = best_rate == 0.0;
      if (!first && one.missed == best.missed && rate < specrt::kLeastGain * plain) continue;
      if (!first && one.missed > best.missed) continue;
      if (!first && one.missed == best.missed && rate <= best_rate) continue;
      best_rate = rate;
      best = one;
    }
  }
  return best;
}

TEST(planner_with_targets_agrees_with_looking_at_every_total) {
  std::mt19937 random(4);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  int missed = 0;
  int met = 0;
  for (int round = 0; round < 400; ++round) {
    const std::size_t count = 1 + random() % 5;
    std::vector<std::vector<double>> gains(count);
    std::vector<DraftCandidate> all;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      double reached = 1.0;
      for (std::uint32_t d = 0; d <= random() % 6; ++d) {
        gains[i].push_back(reached *= uniform(0.2, 1.0));
      }
      most += std::ssize(gains[i]);
      DraftCandidate one{gains[i]};
      one.width = 1.0 + static_cast<double>(random() % 2);
      one.node_seconds = random() % 2 == 0 ? 0.0 : uniform(0.0, 0.02);
      one.tokens = random() % 4 == 0 ? 1.5 : 1.0;
      if (random() % 3 > 0) one.pace_seconds = uniform(0.3, 1.6);
      all.push_back(one);
    }
    std::vector<double> pass{1.0};
    for (std::int64_t n = 0; n < most; ++n) {
      pass.push_back(pass.back() + (random() % 3 == 0 ? uniform(0.0, 0.4) : 0.0));
    }
    std::vector<double> draft{0.0};
    for (int d = 0; d < 4; ++d) draft.push_back(draft.back() + uniform(0.0, 0.1));
    RoundCosts costs{pass, draft};
    if (random() % 3 == 0) costs.limit_seconds = uniform(0.9, 1.5);
    if (random() % 2 == 0) costs.aside_seconds = uniform(0.0, 0.7);
    const Allocation expected = by_every_total(all, costs);
    const Allocation got = allocate_drafts(all, costs, 0.0);
    CHECK_EQ(got.missed, expected.missed);
    CHECK_NEAR(got.tokens / (got.seconds - costs.aside_seconds),
               expected.tokens / (expected.seconds - costs.aside_seconds), 1e-9);
    missed += got.missed > 0 ? 1 : 0;
    met += got.missed == 0 ? 1 : 0;
  }
  CHECK(missed > 50);
  CHECK(met > 50);
}

// Without the targets the drafts would go to the good one and the round would take 4.
TEST(planner_meets_targets) {
  const std::vector<double> good = chain_gains(0.9, 8);
  const std::vector<double> fair = chain_gains(0.5, 8);
  std::vector<DraftCandidate> all{{good}, {fair}};
  const std::vector<double> pass = passes(2, 16, [](std::int64_t rows) {
    return rows <= 6 ? 1.0 : rows <= 12 ? 1.25 : 4.0;
  });
  const std::vector<double> draft = free_drafts(8);
  const Allocation free = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK(free.nodes[0] > free.nodes[1]);
  // 1.25 seconds and 1 + 0.5 + 0.25 + 0.125 tokens: 0.67 a token; one of 1 second would do with 2.
  all[1].pace_seconds = 0.6;
  const Allocation paced = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(paced.missed, 0);
  double tokens = 1.0;
  for (std::int64_t k = 0; k < paced.nodes[1]; ++k) tokens += fair[k];
  CHECK(paced.seconds / tokens <= 0.6);
  // A target that nothing meets is missed alone: the rest is as good as it gets.
  all[1].pace_seconds = 0.1;
  const Allocation missed = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(missed.missed, 1);
  CHECK(missed.tokens / missed.seconds >= free.tokens / free.seconds - 1e-9);
  // A prompt that waits: nothing longer than the shortest pass.
  all[1].pace_seconds = 0.0;
  const Allocation limited = allocate_drafts(all, {pass, draft, 1.1}, 0.0);
  CHECK_EQ(limited.missed, 0);
  CHECK(limited.seconds <= 1.1);
  CHECK_EQ(limited.nodes[0] + limited.nodes[1], 4);
}

// Somebody without a draft, whom others' drafts slow: 1 second without any, more with.
TEST(planner_keeps_the_pace_of_who_drafts_nothing) {
  const std::vector<double> good = chain_gains(0.9, 8);
  std::vector<DraftCandidate> all{{good}, {}};
  const std::vector<double> pass =
      passes(2, 8, [](std::int64_t rows) { return rows <= 3 ? 1.0 : 1.25; });
  const std::vector<double> draft = free_drafts(8);
  const Allocation free = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(free.nodes[0], 8);
  all[1].pace_seconds = 1.1;
  CHECK_EQ(allocate_drafts(all, {pass, draft}, 0.0).nodes[0], 1);
  all[1].pace_seconds = 1.3;
  CHECK_EQ(allocate_drafts(all, {pass, draft}, 0.0).nodes[0], 8);
  // No round is fast enough for it: the fastest while it can be in time by its end, else any.
  all[1].pace_seconds = 0.7;
  all[1].hope_seconds = 0.95;
  const Allocation hopes = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(hopes.nodes[0], 1);
  CHECK_EQ(hopes.missed, 0);
  all[1].hope_seconds = 0.85;
  const Allocation lost = allocate_drafts(all, {pass, draft}, 0.0);
  CHECK_EQ(lost.nodes[0], 8);
  CHECK_EQ(lost.missed, 1);
  // What is expected of a draft that is no choice counts for it.
  all[1].tokens = 2.0;
  CHECK_EQ(allocate_drafts(all, {pass, draft}, 0.0).nodes[0], 8);
  CHECK_EQ(allocate_drafts(all, {pass, draft}, 0.0).missed, 0);
  all[1].tokens = 1.0;
  // And what prompts take of a round does not.
  CHECK_EQ(allocate_drafts(all, {pass, draft, 0.0, 0.6}, 0.0).missed, 0);
}

TEST(planner_refuses_no_costs) {
  const DraftCandidate one;
  CHECK_THROWS(allocate_drafts(std::span(&one, 1), {}, 0.0), specrt::InvalidArgument, "[costs]");
}

TEST(planner_pace) {
  CHECK_EQ(specrt::pace_of(0.0, 5.0, 3), 0.0);
  CHECK_NEAR(specrt::pace_of(0.1, 1.0, 10), 0.1, 1e-12);        // just in time
  CHECK_NEAR(specrt::pace_of(0.1, 1.8, 10), 0.05, 1e-12);       // 0.8 s behind, over 16 tokens
  CHECK_NEAR(specrt::pace_of(0.1, 100.0, 10), 0.1 / 4, 1e-12);  // and never less than this
  CHECK_NEAR(specrt::pace_of(0.1, 0.0, 1000), 0.1 * 4, 1e-12);
  CHECK_NEAR(specrt::pace_of(0.1, 1.4, 10, 8), 0.05, 1e-12);  // 0.4 s behind, over 8
}

TEST(cost_model_interpolates) {
  CostModel model;
  CHECK(!model.measured());
  model.set_pass({{1, 1.0}, {8, 1.0}, {16, 2.0}, {32, 1.8}}, 0.01, 0.001);
  CHECK(model.measured());
  CHECK_NEAR(model.pass_seconds(1, 1, 0), 1.0, 1e-12);
  CHECK_NEAR(model.pass_seconds(5, 1, 0), 1.0, 1e-12);
  CHECK_NEAR(model.pass_seconds(12, 1, 0), 1.45, 1e-12);
  CHECK_NEAR(model.pass_seconds(16, 1, 0), 1.9, 1e-12);  // it fell: both are their mean
  CHECK_NEAR(model.pass_seconds(32, 1, 0), 1.9, 1e-12);
  CHECK_NEAR(model.pass_seconds(8, 4, 1000), 1.0 + 0.03 + 1.0, 1e-12);
  model.set_pass({{1, 1.0}, {2, 1.5}}, 0.0, 0.0);
  CHECK_NEAR(model.pass_seconds(4, 1, 0), 2.5, 1e-12);  // a line beyond the last
  CHECK_THROWS(model.set_pass({}, 0.0, 0.0), specrt::InvalidArgument, "[table]");
  CHECK_THROWS(model.set_pass({{2, 1.0}, {2, 1.0}}, 0.0, 0.0), specrt::InvalidArgument, "[rows]");
  CHECK_THROWS(model.set_pass({{1, NAN}}, 0.0, 0.0), specrt::InvalidArgument, "[seconds]");
}

TEST(cost_model_follows_what_passes_take) {
  CostModel guess(specrt::CpuIsa::amx);
  guess.observe_pass(1, 1, 0, 0.5);  // the first one seen says what the guess is a multiple of
  CHECK_NEAR(guess.pass_seconds(1, 1, 0), 0.5, 1e-12);
  CHECK_NEAR(guess.pass_seconds(2, 1, 0), 0.51, 1e-12);

  CostModel model;
  model.set_pass({{1, 1.0}, {8, 1.0}, {16, 2.0}}, 0.0, 0.0);
  model.observe_pass(1, 1, 0, 1000.0);  // somebody else had the processor
  CHECK(model.pass_seconds(1, 1, 0) < 1.2);
  for (int i = 0; i < 60; ++i) model.observe_pass(1, 1, 0, 1.0);
  CHECK_NEAR(model.pass_seconds(1, 1, 0), 1.0, 0.01);
  // Twice as slow: sizes not seen follow.
  for (int i = 0; i < 60; ++i) model.observe_pass(1, 1, 0, 2.0);
  CHECK_NEAR(model.pass_seconds(1, 1, 0), 2.0, 0.02);
  CHECK_NEAR(model.pass_seconds(16, 1, 0), 4.0, 0.8);
  // What differs between sizes is told apart where they take turns.
  for (int i = 0; i < 400; ++i) {
    model.observe_pass(1, 1, 0, 1.0);
    model.observe_pass(16, 1, 0, 3.0);
  }
  CHECK_NEAR(model.pass_seconds(1, 1, 0), 1.0, 0.1);
  CHECK_NEAR(model.pass_seconds(16, 1, 0), 3.0, 0.3);
}

TEST(cost_model_of_drafters) {
  CostModel model;
  model.set_pass({{1, 1.0}}, 0.0, 0.0);
  CHECK_NEAR(model.draft_seconds("model", 0.2, 3, 1), 0.6, 1e-12);  // as step_cost() has it
  CHECK_NEAR(model.draft_seconds("ngram", 0.0, 3, 1), 0.0, 1e-12);
  model.observe_draft("ngram", 0.0, 3, 1, 0.01);
  CHECK_NEAR(model.draft_seconds("ngram", 0.0, 3, 1), 0.01, 1e-12);
  CHECK_NEAR(model.draft_seconds("ngram", 0.0, 8, 1), 0.01, 1e-12);
  model.observe_draft("model", 0.2, 4, 1, 2.0);
  CHECK_NEAR(model.draft_seconds("model", 0.2, 1, 1), 0.5, 1e-12);
  model.set_draft("head", {0.1, 0.2, 0.05});
  CHECK_NEAR(model.draft_seconds("head", 0.0, 3, 4), 0.1 + 3 * (0.2 + 4 * 0.05), 1e-12);
  for (int i = 0; i < 60; ++i) model.observe_draft("head", 0.0, 3, 4, 2.6);
  CHECK_NEAR(model.draft_seconds("head", 0.0, 3, 4), 2.6, 0.05);
  CHECK_THROWS(model.set_draft("head", {-0.1, 0.0, 0.0}), specrt::InvalidArgument, "[draft]");
}

TEST(cost_model_as_text) {
  CostModel model;
  model.set_pass({{1, 0.001}, {16, 0.0015}}, 1e-5, 1e-8);
  model.set_draft("draft model", {1e-4, 2e-4, 3e-5});
  for (int i = 0; i < 5; ++i) model.observe_pass(1, 1, 0, 0.002);
  const CostModel again = CostModel::parse(model.text());
  CHECK(again.measured());
  for (const std::int64_t rows : {1, 7, 16, 64}) {
    CHECK_NEAR(again.pass_seconds(rows, 3, 500), model.pass_seconds(rows, 3, 500), 1e-9);
  }
  CHECK_NEAR(again.draft_seconds("draft model", 0.0, 4, 2),
             model.draft_seconds("draft model", 0.0, 4, 2), 1e-9);
  for (const char* text :
       {"", "specrt-cost 2\n", "specrt-cost 1\nnonsense 3\n", "specrt-cost 1\npass 1\n",
        "specrt-cost 1\npass 1 x\n", "specrt-cost 1\n", "specrt-cost 1\npass 1 1\ndraft 1 1 1\n"}) {
    CHECK_THROWS(CostModel::parse(text), specrt::InvalidArgument, "expected");
  }
}
