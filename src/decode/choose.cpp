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

}  // namespace

Chooser::Chooser(const cpu::Kernels& kernels, std::int64_t vocab_size)
    : kernels_(&kernels), weights_(static_cast<std::size_t>(vocab_size)) {
  ids_.reserve(static_cast<std::size_t>(vocab_size));
  kept_.reserve(static_cast<std::size_t>(vocab_size));
}

std::int64_t Chooser::bytes() const {
  return static_cast<std::int64_t>(weights_.capacity() * 4 + ids_.capacity() * 4 +
                                   kept_.capacity() * 4);
}

TokenId Chooser::choose(std::span<const float> logits, const SamplingParams& params,
                        std::int64_t position) {
  TokenId arg_max = 0;
  const float max = finite_max(*kernels_, logits, &arg_max);
  if (params.greedy()) return arg_max;

  const auto n = static_cast<std::int64_t>(logits.size());
  const auto inv_temperature = static_cast<float>(1.0 / params.temperature);
  const double sum = kernels_->exp_weights(logits.data(), n, max, inv_temperature, weights_.data());
  cpu::NoiseKey key;
  key.seed = params.seed;
  key.sample_index = params.sample_index;
  key.position = static_cast<std::uint32_t>(position);
  key.purpose = static_cast<std::uint32_t>(Purpose::target_choice);

  const bool filtered = (params.top_k > 0 && params.top_k < n) || params.top_p < 1.0 ||
                        params.min_p > 0.0;
  if (!filtered) {
    return static_cast<TokenId>(kernels_->race(weights_.data(), nullptr, n, key).token);
  }
  filter(logits, params, sum);
  kept_.clear();
  for (const std::int32_t id : ids_) kept_.push_back(weights_[static_cast<std::size_t>(id)]);
  return static_cast<TokenId>(
      kernels_->race(kept_.data(), ids_.data(), static_cast<std::int64_t>(ids_.size()), key).token);
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
    if (weights_[static_cast<std::size_t>(id)] > floor) ids_.push_back(static_cast<std::int32_t>(id));
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
  return double{max} +
         std::log(kernels_->exp_sum(logits.data(), static_cast<std::int64_t>(logits.size()), max,
                                    1.0f));
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
    out.top.emplace_back(
        id, static_cast<float>(double{logits[static_cast<std::size_t>(id)]} - lse));
  }
}

}  // namespace specrt
