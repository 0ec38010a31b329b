#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "specrt/export.h"

namespace specrt {

/// How many nodes a sequence drafts in a round.
enum class Policy : std::uint8_t {
  fixed = 0,  ///< always num_speculative_tokens
  brake,      ///< fewer where its own drafts fail, by constants: repeats, whatever runs beside it
  ema_tiers,  ///< SGLang's adaptive steps: tiers by batch size, moved by a mean of what is accepted
  goodput,    ///< what a measured cost model says yields the most tokens a second, under targets
              ///< (Li et al. 2503.05096); where drafts may change the text, as brake
  adasd,      ///< two thresholds learnt on the way (2512.11280): lossy
  off,        ///< drafts nothing and captures nothing
};

SPECRT_API Policy policy_from_name(const std::string& name);
SPECRT_API const char* name_of(Policy policy);

/// Speculation of one sequence: read by Decoder and by plan_policies().
struct SPECRT_API Speculation {
  Policy policy = Policy::brake;
  /// Draft nodes a round, at most; -1: what the plan was asked for.
  std::int64_t num_speculative_tokens = -1;
  /// Targets in seconds, 0 for none: mean time per token after the first, and to the first token
  /// from its arrival (add(), less its waited_seconds). `goodput` heeds them.
  double target_tpot_seconds = 0.0;
  double target_ttft_seconds = 0.0;
  /// Not empty: drafted tokens are accepted with these probabilities, by depth, of those that are
  /// reached (the last one holds for what is deeper), whatever the target says. What comes out is
  /// not the target's text; for measuring what drafts of a given quality would gain.
  std::vector<double> synthetic_acceptance_rates;

  /// Whether it drafts at all: where not, it takes no drafter and captures nothing.
  bool drafts() const { return policy != Policy::off && num_speculative_tokens != 0; }
  bool synthetic() const { return !synthetic_acceptance_rates.empty(); }
  double synthetic_rate(std::int64_t depth) const {
    const auto at = static_cast<std::size_t>(depth) - 1;
    return at < synthetic_acceptance_rates.size() ? synthetic_acceptance_rates[at]
                                                  : synthetic_acceptance_rates.back();
  }

  /// Throws InvalidArgument naming the first field out of range, or of no use beside another.
  void check() const;
};

}  // namespace specrt
