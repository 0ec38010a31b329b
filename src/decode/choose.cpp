#include "decode/choose.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.h"
#include "specrt/error.h"

namespace specrt {
namespace {

float finite_max(const cpu::Kernels& kernels, std::span<const float> logits, TokenId* arg_max) {
  const cpu::ArgMax best = kernels.arg_max(logits.data(), static_cast<std::int64_t>(logits.size()));
  if (!best.finite) {
    throw NumericError(expected_got("logits", "finite numbers", "NaN or infinity"));
  }
  *arg_max = static_cast<TokenId>(best.index);
  return best.value;
}

}  // namespace

cpu::NoiseKey noise_key(const SamplingParams& params, std::int64_t position,
                        std::uint32_t purpose) {
  cpu::NoiseKey key;
  key.seed = params.seed;
  key.sample_index = params.sample_index;
  key.position = static_cast<std::uint32_t>(position);
  key.purpose = purpose;
  return key;
}

Chooser::Chooser(const cpu::Kernels& kernels, std::int64_t vocab_size)
    : kernels_(&kernels),
      weights_(static_cast<std::size_t>(vocab_size)),
      processed_(static_cast<std::size_t>(vocab_size)),
      law_(static_cast<std::size_t>(vocab_size)),
      race_weights_(static_cast<std::size_t>(vocab_size)),
      filter_(kernels, vocab_size) {}

std::span<const float> Chooser::processed(std::span<const float> logits, LogitsState& state,
                                          TokenConstraint* constraint) {
  if (state.neutral()) return logits;
  TokenId unused = 0;
  finite_max(*kernels_, logits, &unused);
  const std::span<float> out(processed_.data(), logits.size());
  std::copy(logits.begin(), logits.end(), out.begin());
  state.process(*kernels_, out, constraint);
  if (!kernels_->arg_max(out.data(), static_cast<std::int64_t>(out.size())).finite) {
    throw InvalidArgument(expected_got("sampling", "a token that may come next",
                                       "every token masked by allowed_token_ids, bad_words, "
                                       "min_tokens, logit_bias or the grammar"));
  }
  return out;
}

TokenId Chooser::choose(std::span<const float> logits, const SamplingParams& params,
                        std::int64_t position) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  if (params.greedy()) return arg_max;

  const auto n = static_cast<std::int64_t>(logits.size());
  const auto inv_temperature = static_cast<float>(1.0 / params.temperature);
  const double sum = kernels_->exp_weights(logits.data(), n, max, inv_temperature, weights_.data());
  if (!Filter::wanted(params, n)) {
    return draw({weights_.data(), logits.size()}, params, position,
                purpose_word(Purpose::target_choice));
  }
  filter_.apply(logits, {weights_.data(), logits.size()}, max, sum, params);
  const std::span<const std::int32_t> ids = filter_.ids();
  return static_cast<TokenId>(
      kernels_
          ->race(filter_.weights().data(), ids.data(), std::ssize(ids),
                 noise_key(params, position, purpose_word(Purpose::target_choice)))
          .token);
}

// The race again and again, each time without who has won. No ids: a place is its id.
void Chooser::race_on(std::span<float> weights, std::span<const std::int32_t> ids, double sum,
                      const cpu::NoiseKey& key, std::int64_t count) {
  picks_.clear();
  while (std::ssize(picks_) < count) {
    const cpu::Race race = kernels_->race(weights.data(), ids.empty() ? nullptr : ids.data(),
                                          std::ssize(weights), key);
    if (race.token < 0) break;
    std::size_t place = static_cast<std::size_t>(race.token);
    if (!ids.empty()) {
      place = static_cast<std::size_t>(std::lower_bound(ids.begin(), ids.end(), race.token) -
                                       ids.begin());
    }
    picks_.push_back({static_cast<TokenId>(race.token), race.key,
                      static_cast<float>(std::log(double{weights[place]} / sum))});
    weights[place] = 0.0f;
  }
}

std::span<const Chooser::Pick> Chooser::ranked(std::span<const float> logits,
                                               const SamplingParams& params, std::int64_t position,
                                               std::int64_t count) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  const auto n = static_cast<std::int64_t>(logits.size());
  const auto inv_temperature = static_cast<float>(1.0 / params.temperature);
  double sum = kernels_->exp_weights(logits.data(), n, max, inv_temperature, weights_.data());
  const cpu::NoiseKey key = noise_key(params, position, purpose_word(Purpose::target_choice));
  if (!Filter::wanted(params, n)) {
    race_on({weights_.data(), logits.size()}, {}, sum, key, count);
    return picks_;
  }
  filter_.apply(logits, {weights_.data(), logits.size()}, max, sum, params);
  const std::span<const float> kept = filter_.weights();
  std::copy(kept.begin(), kept.end(), race_weights_.begin());
  sum = kernels_->share_from(kept.data(), kept.data(), std::ssize(kept), 0.0f).sum;
  race_on({race_weights_.data(), kept.size()}, filter_.ids(), sum, key, count);
  return picks_;
}

std::span<const Chooser::Pick> Chooser::draws(std::span<const float> law,
                                              const SamplingParams& params, std::int64_t position,
                                              std::uint32_t purpose, std::int64_t count) {
  std::copy(law.begin(), law.end(), race_weights_.begin());
  race_on({race_weights_.data(), law.size()}, {}, 1.0, noise_key(params, position, purpose), count);
  return picks_;
}

TokenId Chooser::draw(std::span<const float> weights, const SamplingParams& params,
                      std::int64_t position, std::uint32_t purpose) const {
  const cpu::Race race =
      kernels_->race(weights.data(), nullptr, static_cast<std::int64_t>(weights.size()),
                     noise_key(params, position, purpose));
  if (race.token < 0) {
    throw NumericError(expected_got("sampling", "a token with a positive weight", "none"));
  }
  return static_cast<TokenId>(race.token);
}

std::span<float> Chooser::distribution(std::span<const float> logits,
                                       const SamplingParams& params) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  if (!params.greedy()) return law_at(logits, max, params.temperature, params);
  const std::span<float> law(law_.data(), logits.size());
  std::fill(law.begin(), law.end(), 0.0f);
  law[static_cast<std::size_t>(arg_max)] = 1.0f;
  return law;
}

std::span<float> Chooser::softened(std::span<const float> logits, const SamplingParams& params) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  return law_at(logits, max, params.greedy() ? 1.0 : params.temperature, params);
}

std::span<float> Chooser::law_at(std::span<const float> logits, float max, double temperature,
                                 const SamplingParams& params) {
  const std::span<float> law(law_.data(), logits.size());
  const auto n = static_cast<std::int64_t>(logits.size());
  const auto inv_temperature = static_cast<float>(1.0 / temperature);
  const double sum = kernels_->exp_weights(logits.data(), n, max, inv_temperature, weights_.data());
  if (!Filter::wanted(params, n)) {
    const auto scale = static_cast<float>(1.0 / sum);
    for (std::size_t id = 0; id < law.size(); ++id) law[id] = weights_[id] * scale;
    return law;
  }
  filter_.apply(logits, {weights_.data(), logits.size()}, max, sum, params);
  const std::span<const std::int32_t> ids = filter_.ids();
  const std::span<const float> kept = filter_.weights();
  const double total = kernels_->share_from(kept.data(), kept.data(), std::ssize(kept), 0.0f).sum;
  std::fill(law.begin(), law.end(), 0.0f);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    law[static_cast<std::size_t>(ids[i])] = static_cast<float>(double{kept[i]} / total);
  }
  return law;
}

double Chooser::log_sum_exp(std::span<const float> logits, float* max) {
  TokenId arg_max = 0;
  *max = finite_max(*kernels_, logits, &arg_max);
  return double{*max} + std::log(kernels_->exp_sum(
                            logits.data(), static_cast<std::int64_t>(logits.size()), *max, 1.0f));
}

float Chooser::logprob(std::span<const float> logits, TokenId token) {
  float max = 0.0f;
  const double lse = log_sum_exp(logits, &max);
  return static_cast<float>(double{logits[static_cast<std::size_t>(token)]} - lse);
}

void Chooser::logprobs(std::span<const float> logits, TokenId token, std::int32_t top,
                       TokenLogprobs& out) {
  float max = 0.0f;
  const double lse = log_sum_exp(logits, &max);
  const float own = logits[static_cast<std::size_t>(token)];
  out.logprob = static_cast<float>(double{own} - lse);
  // Those above, and its equals of a lower id.
  const auto size = static_cast<std::int64_t>(logits.size());
  const float above = std::nextafter(own, std::numeric_limits<float>::infinity());
  out.rank = 1 + kernels_->share_from(logits.data(), nullptr, size, above).count +
             kernels_->share_from(logits.data(), nullptr, token, own).count -
             kernels_->share_from(logits.data(), nullptr, token, above).count;
  out.top.clear();
  if (top <= 0) return;
  for (const std::int32_t id : filter_.most_likely(logits, max, top)) {
    out.top.emplace_back(id,
                         static_cast<float>(double{logits[static_cast<std::size_t>(id)]} - lse));
  }
}

void Chooser::most_likely(std::span<const float> logits, std::int64_t count,
                          std::vector<std::pair<TokenId, float>>& out) {
  float max = 0.0f;
  const double lse = log_sum_exp(logits, &max);
  out.clear();
  for (const std::int32_t id : filter_.most_likely(logits, max, count)) {
    const float logit = logits[static_cast<std::size_t>(id)];
    if (std::isinf(logit)) break;
    out.emplace_back(id, static_cast<float>(double{logit} - lse));
  }
}

}  // namespace specrt
