#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "cpu/kernels.h"
#include "decode/filter.h"
#include "decode/logits_state.h"
#include "specrt/decoder.h"
#include "specrt/sampling.h"

namespace specrt {

/// The random stream of a purpose_word() at `position`.
cpu::NoiseKey noise_key(const SamplingParams& params, std::int64_t position, std::uint32_t purpose);

/// Chooses the next token from one row of logits: arg-max, or arg-max of the processed
/// log-probabilities plus the position's Gumbel noise, taken as the equivalent exponential race.
/// A pure function of (logits, params, state, position); the buffers only save allocations.
class Chooser {
 public:
  Chooser(const cpu::Kernels& kernels, std::int64_t vocab_size);

  /// The logits after `state`: themselves where it is neutral, else a copy that is valid until the
  /// next call. `constraint` as LogitsState::process has it. Throws NumericError where the raw
  /// logits are not finite and InvalidArgument where every token is masked.
  std::span<const float> processed(std::span<const float> logits, LogitsState& state,
                                   TokenConstraint* constraint);

  /// `logits` are processed; `position` is the absolute index of the token that is chosen. Throws
  /// NumericError where the logits hold a NaN or no finite maximum.
  TokenId choose(std::span<const float> logits, const SamplingParams& params,
                 std::int64_t position);

  /// The law that sampling follows: temperature and filters applied to processed logits, summing
  /// to about 1. One-hot where greedy. Valid until the next call.
  std::span<float> distribution(std::span<const float> logits, const SamplingParams& params);

  /// The same, at temperature 1 where greedy.
  std::span<float> softened(std::span<const float> logits, const SamplingParams& params);

  struct Pick {
    TokenId token = 0;
    double key = 0.0;       ///< of the race; -log(key) is log-weight plus noise
    float log_prob = 0.0f;  ///< under the law that sampling follows
  };
  /// The first `count` of the race that choose() runs, its winner first; fewer where fewer tokens
  /// have a weight. Valid until the next call. Throws as choose() does.
  std::span<const Pick> ranked(std::span<const float> logits, const SamplingParams& params,
                               std::int64_t position, std::int64_t count);
  /// `count` draws without replacement from a law that distribution() gave, in draw order.
  std::span<const Pick> draws(std::span<const float> law, const SamplingParams& params,
                              std::int64_t position, std::uint32_t purpose, std::int64_t count);

  /// Draws from weights (any positive scale) with the noise of a purpose_word() at `position`.
  TokenId draw(std::span<const float> weights, const SamplingParams& params, std::int64_t position,
               std::uint32_t purpose) const;

  /// Raw log-softmax of `token` and of the `top` most likely.
  void logprobs(std::span<const float> logits, TokenId token, std::int32_t top, TokenLogprobs& out);

  /// The `count` most likely tokens, most likely first, each with its log-softmax. Those of no
  /// probability are left out.
  void most_likely(std::span<const float> logits, std::int64_t count,
                   std::vector<std::pair<TokenId, float>>& out);

  /// log-softmax of one token.
  float logprob(std::span<const float> logits, TokenId token);

  /// Buffers of a vocabulary of so many tokens.
  static std::int64_t bytes_for(std::int64_t vocab_size) {
    return vocab_size * 16 + Filter::bytes_for(vocab_size);
  }

 private:
  std::span<float> law_at(std::span<const float> logits, float max, double temperature,
                          const SamplingParams& params);
  void race_on(std::span<float> weights, std::span<const std::int32_t> ids, double sum,
               const cpu::NoiseKey& key, std::int64_t count);
  double log_sum_exp(std::span<const float> logits, float* max);

  const cpu::Kernels* kernels_;
  std::vector<float> weights_;  // exp((x - max) / T), by vocabulary id
  std::vector<float> processed_;
  std::vector<float> law_;
  std::vector<float> race_weights_;  // by place, winners set to 0
  std::vector<Pick> picks_;
  Filter filter_;
};

}  // namespace specrt
