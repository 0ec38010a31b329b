#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "specrt/decoder.h"
#include "specrt/sampling.h"

namespace specrt {

/// Chooses the next token from one row of logits: arg-max, or arg-max of the processed
/// log-probabilities plus the position's Gumbel noise, taken as the equivalent exponential race.
/// A pure function of (logits, params, position); the buffers only save allocations.
class Chooser {
 public:
  Chooser(const cpu::Kernels& kernels, std::int64_t vocab_size);

  /// `position` is the absolute index of the token that is chosen. Throws NumericError where the
  /// logits hold a NaN or no finite maximum.
  TokenId choose(std::span<const float> logits, const SamplingParams& params,
                 std::int64_t position);

  /// Raw log-softmax of `token` and of the `top` most likely.
  void logprobs(std::span<const float> logits, TokenId token, std::int32_t top,
                TokenLogprobs& out);

  /// log-softmax of one token.
  float logprob(std::span<const float> logits, TokenId token);

  std::int64_t bytes() const;

 private:
  double log_sum_exp(std::span<const float> logits);
  /// Fills ids_ with what top_k, top_p and min_p leave.
  void filter(std::span<const float> logits, const SamplingParams& params, double sum);

  const cpu::Kernels* kernels_;
  std::vector<float> weights_;      // exp((x - max) / T), by vocabulary id
  std::vector<std::int32_t> ids_;   // candidates left by the filters
  std::vector<float> kept_;         // their weights
};

}  // namespace specrt
