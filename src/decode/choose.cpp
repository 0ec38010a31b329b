#include "decode/choose.h"

#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "specrt/error.h"

namespace specrt {
namespace {

// More likely first; equal logits go by the lower id.
struct ByLogit {
  const float* logits;
  bool operator()(std::int32_t a, std::int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

float finite_max(const cpu::Kernels& kernels, std::span<const float> logits, TokenId* arg_max) {
  const cpu::ArgMax best = kernels.arg_max(logits.data(), static_cast<std::int64_t>(logits.size()));
  if (!best.finite) {
    throw NumericError(expected_got("logits", "finite numbers", "NaN or infinity"));
  }
  *arg_max = static_cast<TokenId>(best.index);
  return best.value;
}

cpu::NoiseKey noise_key(const SamplingParams& params, std::int64_t position,
                        std::uint32_t purpose) {
  cpu::NoiseKey key;
  key.seed = params.seed;
  key.sample_index = params.sample_index;
  key.position = static_cast<std::uint32_t>(position);
  key.purpose = purpose;
  return key;
}

bool filters(const SamplingParams& params, std::int64_t vocab_size) {
  return (params.top_k > 0 && params.top_k < vocab_size) || params.top_p < 1.0 ||
         params.min_p > 0.0;
}

}  // namespace

Chooser::Chooser(const cpu::Kernels& kernels, std::int64_t vocab_size)
    : kernels_(&kernels),
      weights_(static_cast<std::size_t>(vocab_size)),
      processed_(static_cast<std::size_t>(vocab_size)),
      law_(static_cast<std::size_t>(vocab_size)) {
  ids_.reserve(static_cast<std::size_t>(vocab_size));
  kept_.reserve(static_cast<std::size_t>(vocab_size));
}

std::span<const float> Chooser::processed(std::span<const float> logits, LogitsState& state,
                                          bool with_constraint) {
  if (state.neutral()) return logits;
  TokenId unused = 0;
  finite_max(*kernels_, logits, &unused);
  const std::span<float> out(processed_.data(), logits.size());
  std::copy(logits.begin(), logits.end(), out.begin());
  state.process(out, with_constraint);
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
  if (!filters(params, n)) {
    return draw({weights_.data(), logits.size()}, params, position,
                purpose_word(Purpose::target_choice));
  }
  filter(logits, params, sum);
  kept_.clear();
  for (const std::int32_t id : ids_) kept_.push_back(weights_[static_cast<std::size_t>(id)]);
  return static_cast<TokenId>(
      kernels_
          ->race(kept_.data(), ids_.data(), static_cast<std::int64_t>(ids_.size()),
                 noise_key(params, position, purpose_word(Purpose::target_choice)))
          .token);
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
  const std::span<float> law(law_.data(), logits.size());
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  if (params.greedy()) {
    std::fill(law.begin(), law.end(), 0.0f);
    law[static_cast<std::size_t>(arg_max)] = 1.0f;
    return law;
  }
  const auto n = static_cast<std::int64_t>(logits.size());
  const auto inv_temperature = static_cast<float>(1.0 / params.temperature);
  double sum = kernels_->exp_weights(logits.data(), n, max, inv_temperature, weights_.data());
  if (!filters(params, n)) {
    const auto scale = static_cast<float>(1.0 / sum);
    for (std::size_t id = 0; id < law.size(); ++id) law[id] = weights_[id] * scale;
    return law;
  }
  filter(logits, params, sum);
  sum = 0.0;
  for (const std::int32_t id : ids_) sum += double{weights_[static_cast<std::size_t>(id)]};
  std::fill(law.begin(), law.end(), 0.0f);
  for (const std::int32_t id : ids_) {
    law[static_cast<std::size_t>(id)] =
        static_cast<float>(double{weights_[static_cast<std::size_t>(id)]} / sum);
  }
  return law;
}

void Chooser::filter(std::span<const float> logits, const SamplingParams& params, double sum) {
  const auto n = static_cast<std::int64_t>(logits.size());
  const ByLogit order{logits.data()};
  const bool by_top_k = params.top_k > 0 && params.top_k < n;
  const bool by_top_p = params.top_p < 1.0;
  ids_.clear();
  // The bottom tokens of at most (1 - top_p) / n each weigh no more than 1 - top_p together, so
  // none of them can be in the nucleus: what has to be sorted is short.
  const double floor =
      by_top_p && !by_top_k ? sum * (1.0 - params.top_p) / static_cast<double>(n) : -1.0;
  for (std::int64_t id = 0; id < n; ++id) {
    if (weights_[static_cast<std::size_t>(id)] > floor)
      ids_.push_back(static_cast<std::int32_t>(id));
  }
  if (by_top_k) {
    const auto kth = ids_.begin() + static_cast<std::ptrdiff_t>(params.top_k);
    std::nth_element(ids_.begin(), kth - 1, ids_.end(), order);
    ids_.erase(kth, ids_.end());
  }
  if (by_top_p) {
    std::sort(ids_.begin(), ids_.end(), order);
    double total = sum;
    if (by_top_k) {
      total = 0.0;
      for (const std::int32_t id : ids_) total += double{weights_[static_cast<std::size_t>(id)]};
    }
    // A token stays while those before it weigh less than top_p.
    double before = 0.0;
    std::size_t keep = 0;
    while (keep < ids_.size() && (keep == 0 || before < params.top_p * total)) {
      before += double{weights_[static_cast<std::size_t>(ids_[keep])]};
      ++keep;
    }
    ids_.resize(keep);
  }
  if (params.min_p > 0.0) {
    // Relative to the most likely token, whose weight is exactly 1.
    std::erase_if(ids_, [&](std::int32_t id) {
      return double{weights_[static_cast<std::size_t>(id)]} < params.min_p;
    });
  }
}

double Chooser::log_sum_exp(std::span<const float> logits) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  return double{max} + std::log(kernels_->exp_sum(
                           logits.data(), static_cast<std::int64_t>(logits.size()), max, 1.0f));
}

float Chooser::logprob(std::span<const float> logits, TokenId token) {
  return static_cast<float>(double{logits[static_cast<std::size_t>(token)]} - log_sum_exp(logits));
}

void Chooser::logprobs(std::span<const float> logits, TokenId token, std::int32_t top,
                       TokenLogprobs& out) {
  const double lse = log_sum_exp(logits);
  const float own = logits[static_cast<std::size_t>(token)];
  out.logprob = static_cast<float>(double{own} - lse);
  out.rank = 1;
  for (std::size_t id = 0; id < logits.size(); ++id) {
    const bool ahead = logits[id] > own || (logits[id] == own && static_cast<TokenId>(id) < token);
    out.rank += ahead ? 1 : 0;
  }
  out.top.clear();
  if (top <= 0) return;
  ids_.resize(logits.size());
  for (std::size_t id = 0; id < logits.size(); ++id) ids_[id] = static_cast<std::int32_t>(id);
  const ByLogit order{logits.data()};
  const auto count = std::min<std::size_t>(static_cast<std::size_t>(top), ids_.size());
  std::partial_sort(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(count), ids_.end(),
                    order);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t id = ids_[i];
    out.top.emplace_back(id,
                         static_cast<float>(double{logits[static_cast<std::size_t>(id)]} - lse));
  }
}

}  // namespace specrt
