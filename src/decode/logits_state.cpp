#include "decode/logits_state.h"

#include <algorithm>
#include <limits>

namespace specrt {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void keep(const cpu::Kernels& kernels, std::span<float> logits,
          std::span<const std::uint32_t> bits) {
  // A drafter's vocabulary may be smaller than the target's.
  const auto size = std::min(logits.size(), bits.size() * 32);
  kernels.keep_bits(logits.data(), static_cast<std::int64_t>(size), bits.data());
}

}  // namespace

TokenConstraint::~TokenConstraint() = default;

LogitsState::LogitsState(const SamplingParams& params, std::span<const TokenId> prompt,
                         std::int64_t vocab_size, std::shared_ptr<TokenConstraint> constraint)
    : params_(params), constraint_(std::move(constraint)) {
  penalties_ = params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 ||
               params.presence_penalty != 0.0;
  neutral_ = !penalties_ && params.logit_bias.empty() && params.allowed_token_ids.empty() &&
             params.bad_words.empty() && params.min_tokens == 0 && constraint_ == nullptr;
  const auto words = static_cast<std::size_t>((vocab_size + 31) / 32);
  if (!params.allowed_token_ids.empty()) {
    allowed_.assign(words, 0);
    for (const TokenId id : params.allowed_token_ids) {
      allowed_[static_cast<std::size_t>(id) / 32] |= 1u << (id % 32);
    }
  }
  if (constraint_ != nullptr) bits_.assign(words, 0);
  if (penalties_) {
    for (const TokenId token : prompt) seen_[token].in_prompt = true;
  }
  if (!params.bad_words.empty()) {
    std::size_t longest = 0;
    for (const auto& word : params.bad_words) longest = std::max(longest, word.size());
    const std::size_t keep = std::min(prompt.size(), longest);
    tail_.assign(prompt.end() - static_cast<std::ptrdiff_t>(keep), prompt.end());
  }
}

void LogitsState::push(TokenId token) {
  if (neutral_) return;
  ++generated_;
  if (penalties_) ++seen_[token].in_output;
  if (!params_.bad_words.empty()) tail_.push_back(token);
}

void LogitsState::pop(TokenId token) {
  if (neutral_) return;
  --generated_;
  if (penalties_) {
    const auto found = seen_.find(token);
    if (--found->second.in_output == 0 && !found->second.in_prompt) seen_.erase(found);
  }
  if (!params_.bad_words.empty()) tail_.pop_back();
}

void LogitsState::commit(TokenId token) {
  push(token);
  if (constraint_ != nullptr) constraint_->advance(token);
}

void LogitsState::process(const cpu::Kernels& kernels, std::span<float> logits,
                          TokenConstraint* constraint) {
  if (penalties_) penalise(logits);
  for (const auto& [id, bias] : params_.logit_bias) {
    if (static_cast<std::size_t>(id) < logits.size()) logits[static_cast<std::size_t>(id)] += bias;
  }
  mask(kernels, logits, constraint);
}

void LogitsState::penalise(std::span<float> logits) const {
  const auto repetition = static_cast<float>(params_.repetition_penalty);
  const auto frequency = static_cast<float>(params_.frequency_penalty);
  const auto presence = static_cast<float>(params_.presence_penalty);
  for (const auto& [id, seen] : seen_) {
    // A drafter's vocabulary may be smaller than the target's.
    if (static_cast<std::size_t>(id) >= logits.size()) continue;
    float& x = logits[static_cast<std::size_t>(id)];
    x = x > 0.0f ? x / repetition : x * repetition;
    if (seen.in_output > 0) {
      x -= frequency * static_cast<float>(seen.in_output);
      x -= presence;
    }
  }
}

void LogitsState::mask(const cpu::Kernels& kernels, std::span<float> logits,
                       TokenConstraint* constraint) {
  if (!allowed_.empty()) keep(kernels, logits, allowed_);
  const auto never = [&](TokenId id) {
    if (static_cast<std::size_t>(id) < logits.size()) logits[static_cast<std::size_t>(id)] = kNever;
  };
  for (const auto& word : params_.bad_words) {
    const std::size_t before = word.size() - 1;
    if (tail_.size() >= before && std::equal(word.begin(), word.end() - 1,
                                             tail_.end() - static_cast<std::ptrdiff_t>(before))) {
      never(word.back());
    }
  }
  if (generated_ < params_.min_tokens) {
    for (const TokenId id : params_.stop_token_ids) never(id);
  }
  if (constraint != nullptr) {
    constraint->fill_bitmask(bits_);
    keep(kernels, logits, bits_);
  }
}

}  // namespace specrt
