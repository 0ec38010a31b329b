// Ranks of alternatives, as Chooser would take them one after the other.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/rank.h"
#include "specrt/error.h"

using specrt::Chooser;
using specrt::Ranker;
using specrt::SamplingParams;
using specrt::TokenId;

TEST(rank_is_choosing_without_what_came_before) {
  const float none = -std::numeric_limits<float>::infinity();
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  for (const specrt::CpuIsa isa : specrt::available_cpu_isas()) {
    const specrt::cpu::Kernels& kernels = specrt::cpu::kernels_of(isa);
    for (const std::int64_t vocab : {1, 5, 1024, 1025, 5000}) {
      Chooser chooser(kernels, vocab);
      Ranker ranker(kernels, vocab);
      for (int round = 0; round < 12; ++round) {
        std::vector<float> logits(static_cast<std::size_t>(vocab));
        for (float& x : logits) x = normal(random);
        if (vocab > 3) logits[3] = none;
        SamplingParams params;
        params.temperature = round % 3 == 0 ? 0.0 : 0.4 * (round % 3);
        params.seed = static_cast<std::uint64_t>(round);
        if (round % 4 == 1) params.top_k = 6;
        if (round % 4 == 2) params.top_p = 0.7;
        Ranker::Ranked ranked;
        ranker.as_the_target(chooser, logits, params, 17, 10, ranked);
        // Filters look at the whole law once; afterwards what is left is raced for.
        std::vector<float> law;
        for (const float p : chooser.distribution(logits, params)) law.push_back(p);
        const auto possible = params.greedy() ? vocab - (vocab > 3 ? 1 : 0)
                                              : std::count_if(law.begin(), law.end(),
                                                              [](float p) { return p > 0.0f; });
        CHECK_EQ(std::ssize(ranked), std::min<std::int64_t>(10, possible));
        std::vector<float> left = logits;
        for (std::size_t id = 0; id < left.size(); ++id) {
          if (!params.greedy() && law[id] <= 0.0f) left[id] = none;
        }
        SamplingParams unfiltered = params;
        unfiltered.top_k = 0;
        unfiltered.top_p = 1.0;
        for (std::size_t i = 0; i < ranked.size(); ++i) {
          const auto [token, log_prob] = ranked[i];
          CHECK_EQ(token, i == 0 ? chooser.choose(logits, params, 17)
                                 : chooser.choose(left, unfiltered, 17));
          if (!params.greedy()) {
            CHECK_NEAR(log_prob, std::log(law[static_cast<std::size_t>(token)]), 1e-5);
          } else {
            CHECK_NEAR(log_prob, chooser.logprob(logits, token), 1e-5);
          }
          left[static_cast<std::size_t>(token)] = none;
        }
      }
      std::vector<float> wrong(static_cast<std::size_t>(vocab), std::nanf(""));
      Ranker::Ranked ranked;
      CHECK_THROWS(ranker.as_the_target(chooser, wrong, {}, 1, 3, ranked), specrt::NumericError,
                   "logits");
    }
  }
}
