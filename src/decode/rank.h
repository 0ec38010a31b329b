#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "decode/choose.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

/// Ranks tokens for drafters of several alternatives.
class Ranker {
 public:
  using Ranked = std::vector<std::pair<TokenId, float>>;  // token and its log-probability

  Ranker(const cpu::Kernels& kernels, std::int64_t vocab_size);

  /// The `count` tokens that Chooser::choose would take first, each where it could not take those
  /// before it: by probability where greedy, else with the target's noise at `position`, which
  /// makes them a sample without replacement. Fewer where fewer are possible. `logits` are
  /// processed.
  void as_the_target(Chooser& chooser, std::span<const float> logits, const SamplingParams& params,
                     std::int64_t position, std::int64_t count, Ranked& out);

  static std::int64_t bytes_for(std::int64_t vocab_size);

 private:
  static constexpr std::int64_t kPart = 1024;

  const cpu::Kernels* kernels_;
  std::vector<std::int32_t> ids_;  // 0, 1, 2 ...
  std::vector<cpu::Race> parts_;   // the first of each kPart tokens
};

}  // namespace specrt
