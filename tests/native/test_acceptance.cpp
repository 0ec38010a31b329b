#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "decode/acceptance.h"

namespace {

using specrt::Acceptance;
using specrt::Brake;
using specrt::Calibration;
using specrt::DraftCost;
using specrt::RunningMean;

/// Chains whose nodes are accepted with the same probability each, to a fixed plan of rounds.
struct Run {
  std::int64_t nodes = 0;
  std::int64_t accepted = 0;
  std::int64_t drafting_rounds = 0;
  double time = 0.0;  // in passes of one row
  double tokens = 0.0;
};

Run run(Brake& brake, std::mt19937& random, double alpha, int rounds, std::int64_t most,
        const DraftCost& cost) {
  Run out;
  std::uniform_real_distribution<double> coin(0.0, 1.0);
  for (int round = 0; round < rounds; ++round) {
    const std::int64_t nodes = brake.limit(most, cost);
    std::int64_t accepted = 0;
    while (accepted < nodes && coin(random) < alpha) ++accepted;
    brake.observe(nodes, nodes, accepted, accepted < nodes, true);
    out.nodes += nodes;
    out.accepted += accepted;
    out.drafting_rounds += nodes > 0 ? 1 : 0;
    out.tokens += 1.0 + static_cast<double>(accepted);
    out.time += 1.0 + static_cast<double>(nodes) * (cost.row + cost.step);
  }
  return out;
}

}  // namespace

TEST(running_mean_is_a_mean_first_and_fades_later) {
  RunningMean mean(1.0);
  CHECK_EQ(mean.value(), 1.0);
  mean.observe(0.0);
  CHECK_NEAR(mean.value(), 2.0 / 3.0, 1e-12);
  mean.observe(1.0);
  CHECK_NEAR(mean.value(), 3.0 / 4.0, 1e-12);
  for (int i = 0; i < 6; ++i) mean.observe(0.0);  // (2 + 1) / (2 + 8): still a plain mean
  CHECK_NEAR(mean.value(), 3.0 / 10.0, 1e-12);
  mean.observe(0.0);
  CHECK_NEAR(mean.value(), 0.9 * 3.0 / 10.0, 1e-12);
}

// Conditional rates by depth, and depths that were never decided.
TEST(acceptance_by_depth) {
  Acceptance acceptance(0.5);
  CHECK_EQ(acceptance.alpha(1), 0.5);
  CHECK_NEAR(acceptance.expected(3), 0.5 + 0.25 + 0.125, 1e-12);
  acceptance.observe(2, true);  // accepted at 1 and 2, rejected at 3
  CHECK_NEAR(acceptance.alpha(1), 0.5 + 0.5 / 3, 1e-12);
  CHECK_NEAR(acceptance.alpha(2), 0.5 + 0.5 / 3, 1e-12);
  CHECK_NEAR(acceptance.alpha(3), 0.5 - 0.5 / 3, 1e-12);
  CHECK_EQ(acceptance.alpha(9), acceptance.alpha(3));
  const double first = acceptance.alpha(1);
  const double third = acceptance.alpha(3);
  acceptance.observe(0, true);  // depths behind a rejection learn nothing
  CHECK(acceptance.alpha(1) < first);
  CHECK_EQ(acceptance.alpha(3), third);
  acceptance.observe(0, false);  // nothing was decided
  CHECK_EQ(acceptance.alpha(3), third);
}

// A draft that is accepted to its end brings back depths that failed long ago.
TEST(acceptance_depths_out_of_reach_recover) {
  Acceptance acceptance;
  for (int i = 0; i < 60; ++i) acceptance.observe(2, true);
  CHECK(acceptance.alpha(3) < 0.01);
  CHECK(acceptance.alpha(2) > 0.99);
  for (int i = 0; i < 20; ++i) acceptance.observe(2, false);
  CHECK(acceptance.alpha(3) > 0.8);
}

TEST(acceptance_finds_the_rates) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> coin(0.0, 1.0);
  const std::vector<double> rates{0.9, 0.6, 0.3};
  Acceptance acceptance;
  std::vector<double> sums(3, 0.0);
  for (int round = 0; round < 30000; ++round) {
    std::int64_t accepted = 0;
    while (accepted < 3 && coin(random) < rates[static_cast<std::size_t>(accepted)]) ++accepted;
    acceptance.observe(accepted, accepted < 3);
    for (std::size_t d = 0; d < 3; ++d)
      sums[d] += acceptance.alpha(static_cast<std::int64_t>(d) + 1);
  }
  for (std::size_t d = 0; d < 3; ++d) CHECK_NEAR(sums[d] / 30000, rates[d], 0.02);
}

TEST(calibration_tells_confidences_apart) {
  Calibration calibration;
  CHECK_EQ(Calibration::class_of(0.0), 0);
  CHECK_EQ(Calibration::class_of(1.0), Calibration::kClasses - 1);
  CHECK_EQ(Calibration::class_of(0.49), 3);
  CHECK_NEAR(calibration.acceptance(0.9, 0.7), 0.7, 1e-12);  // nothing seen: the rate by depth
  calibration.observe(0.9, true);
  CHECK_NEAR(calibration.acceptance(0.9, 0.7), (1 + 4 * 0.7) / 5, 1e-12);
  CHECK_NEAR(calibration.acceptance(0.1, 0.7), 0.7, 1e-12);
  for (int i = 0; i < 200; ++i) {
    calibration.observe(0.9, i % 2 == 0);
    calibration.observe(0.1, i % 10 == 0);
  }
  CHECK_NEAR(calibration.acceptance(0.9, 0.5), 0.5, 0.06);
  CHECK_NEAR(calibration.acceptance(0.1, 0.1), 0.1, 0.06);
}

// Nothing is known: all that was asked for. Then what pays.
TEST(brake_starts_open) {
  const Brake brake;
  CHECK_EQ(brake.limit(8, {0.02, 0.0}), 8);
  CHECK_EQ(brake.limit(60, {0.1, 0.3}), 60);
  CHECK_EQ(brake.limit(4, {0.02, 1.0}), 4);  // a drafter as dear as the target, if it is right
  CHECK_EQ(brake.limit(0, {0.02, 0.0}), 0);
}

// Drafts that are always right are drafted in full for ever, whatever they cost.
TEST(brake_leaves_good_drafts_alone) {
  for (const double step : {0.0, 0.3, 1.0}) {
    Brake brake;
    std::mt19937 random(1);
    const Run out = run(brake, random, 1.0, 500, 8, {0.02, step});
    CHECK_EQ(out.nodes, 8 * 500);
  }
  Brake brake;
  std::mt19937 random(2);
  const Run out = run(brake, random, 0.85, 500, 8, {0.02, 0.0});
  CHECK(out.nodes > 7 * 500);
}

// Drafts that always fail: fewer, then none, then probes that grow rarer.
TEST(brake_stops_drafts_that_fail) {
  for (const double step : {0.0, 0.1, 0.5, 1.0}) {
    for (const double row : {0.02, 0.1, 0.5}) {
      Brake brake;
      std::vector<std::int64_t> asked;
      double spent = 0.0;
      for (int round = 0; round < 600; ++round) {
        const std::int64_t nodes = brake.limit(8, {row, step});
        asked.push_back(nodes);
        spent += static_cast<double>(nodes) * (row + step);
        brake.observe(nodes, nodes, 0, nodes > 0, true);
      }
      CHECK(spent / 600 < 0.04);  // under 0.9x from the start: see below
      double first = 0.0;
      for (int round = 0; round < 128; ++round) {
        first += static_cast<double>(asked[static_cast<std::size_t>(round)]) * (row + step);
      }
      CHECK(128.0 / (128.0 + first) > 0.9);
      const auto stopped = std::find(asked.begin(), asked.end(), 0);
      CHECK(std::is_sorted(asked.begin(), stopped, std::greater<>()));
      std::vector<std::int64_t> probes;
      for (auto it = stopped; it != asked.end(); ++it) {
        CHECK(*it <= 1);
        if (*it == 1) probes.push_back(it - asked.begin());
      }
      CHECK(probes.size() >= 3);
      for (std::size_t i = 2; i < probes.size(); ++i) {
        CHECK(probes[i] - probes[i - 1] >= probes[i - 1] - probes[i - 2]);
        CHECK(static_cast<double>(probes[i] - probes[i - 1]) <=
              Brake::kLongestPause * (1.0 + Brake::kPausePerCost * (row + step)) + 2.0);
      }
    }
  }
}

// Once a probe succeeds the next comes at once, and a few bring the full draft back.
TEST(brake_recovers) {
  Brake brake;
  const DraftCost cost{0.02, 0.0};
  std::mt19937 random(3);
  run(brake, random, 0.0, 300, 8, cost);
  std::int64_t waited = 0;
  while (brake.limit(8, cost) == 0) {
    brake.observe(0, 0, 0, false, true);
    ++waited;
  }
  CHECK(waited <= Brake::kLongestPause + 10);
  std::int64_t rounds = 0;
  for (; brake.limit(8, cost) < 8; ++rounds) {
    const std::int64_t nodes = brake.limit(8, cost);
    CHECK(nodes > 0);
    brake.observe(nodes, nodes, nodes, false, true);
  }
  CHECK(rounds <= 6);
}

// Whatever the drafts are like, they cost little beyond plain decoding in the long run.
TEST(brake_never_costs_much) {
  std::mt19937 random(4);
  for (const double alpha : {0.0, 0.05, 0.2, 0.4, 0.6, 0.8}) {
    for (const double step : {0.0, 0.2, 0.6, 1.0}) {
      double time = 0.0;
      double tokens = 0.0;
      for (int sequence = 0; sequence < 40; ++sequence) {
        Brake brake;
        const Run out = run(brake, random, alpha, 128, 8, {0.05, step});
        time += out.time;
        tokens += out.tokens;
      }
      CHECK(tokens / time > 0.9);
    }
  }
}

// A tree's nodes go by its width: fewer levels of it.
TEST(brake_counts_trees_by_depth) {
  Brake brake;
  const DraftCost cost{0.05, 0.0};
  for (int i = 0; i < 12; ++i) brake.observe(30, 6, 0, true, true);
  const std::int64_t nodes = brake.limit(30, cost);
  CHECK(nodes <= 5);
  for (int i = 0; i < 40; ++i) brake.observe(30, 6, 6, false, true);
  CHECK_EQ(brake.limit(30, cost), 30);
}

// Rounds that a limit cut short say nothing.
TEST(brake_leaves_out_truncated_rounds) {
  Brake brake;
  for (int i = 0; i < 50; ++i) brake.observe(8, 8, 0, true, false);
  CHECK_EQ(brake.limit(8, {0.5, 1.0}), 8);
}
