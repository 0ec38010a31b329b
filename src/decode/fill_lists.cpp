#include "decode/fill_lists.h"

#include <algorithm>

#include "model/cuda_sampling.h"

namespace specrt {

void fill_lists(const SamplingParams& params, const LogitsState& state, std::int64_t vocab,
                std::span<const std::int32_t> draft_of_target, LogitLists& out) {
  out.clear();
  out.state = sampling_state(params);
  const auto own = [&](TokenId id) -> std::int32_t {
    const auto at = static_cast<std::size_t>(id);
    if (!draft_of_target.empty()) return at < draft_of_target.size() ? draft_of_target[at] : -1;
    return id < vocab ? id : -1;
  };
  for (const TokenId id : params.stop_token_ids) {
    if (own(id) >= 0) out.stops.push_back(own(id));
  }
  out.state.generated = static_cast<std::int32_t>(state.generated());
  out.state.min_tokens =
      static_cast<std::int32_t>(std::min<std::int64_t>(params.min_tokens, INT32_MAX));
  if (state.neutral()) return;
  out.state.repetition = static_cast<float>(params.repetition_penalty);
  out.state.frequency = static_cast<float>(params.frequency_penalty);
  out.state.presence = static_cast<float>(params.presence_penalty);
  out.state.penalties = state.penalties();
  if (state.penalties()) {
    for (const auto& [id, one] : state.seen()) {
      if (own(id) >= 0) out.seen.push_back({own(id), static_cast<std::int32_t>(one.in_output)});
    }
    std::sort(out.seen.begin(), out.seen.end(),
              [](const cuda::SeenToken& a, const cuda::SeenToken& b) { return a.id < b.id; });
  }
  for (const auto& [id, bias] : params.logit_bias) {
    if (own(id) >= 0) out.biases.push_back({own(id), bias});
  }
  const std::span<const std::uint32_t> allowed = state.allowed();
  if (draft_of_target.empty()) {
    out.allowed.assign(allowed.begin(), allowed.end());
  } else if (!allowed.empty()) {
    out.allowed.assign(static_cast<std::size_t>((vocab + 31) / 32), 0);
    for (const TokenId id : params.allowed_token_ids) {
      if (own(id) >= 0) {
        out.allowed[static_cast<std::size_t>(own(id)) / 32] |= 1u << (own(id) % 32);
      }
    }
  }
  // What the drafter has no token for is told apart from all that it has.
  const auto any = [&](TokenId id) { return own(id) >= 0 ? own(id) : -2 - id; };
  std::size_t longest = 0;
  for (const auto& word : params.bad_words) {
    if (own(word.back()) < 0) continue;
    out.words.push_back({static_cast<std::int32_t>(out.word_tokens.size()),
                         static_cast<std::int32_t>(word.size())});
    for (const TokenId id : word) out.word_tokens.push_back(any(id));
    longest = std::max(longest, word.size());
  }
  for (const TokenId id : state.tail().last(std::min(longest, state.tail().size()))) {
    out.tail.push_back(any(id));
  }
  out.state.neutral = !state.penalties() && out.biases.empty() && out.allowed.empty() &&
                      out.words.empty() && state.generated() >= params.min_tokens;
}

void FavouredRequests::add(const DraftRequest& request, std::int64_t vocab,
                           std::span<const std::int32_t> draft_of_target, bool noise) {
  if (count_ == lists_.size()) lists_.emplace_back();
  LogitLists& lists = lists_[count_];
  if (request.logits != nullptr) {
    fill_lists(*request.sampling, *request.logits, vocab, draft_of_target, lists);
  } else {
    lists.clear();
    lists.state = sampling_state(*request.sampling);
  }
  if (!noise) lists.state.temperature = 0.0f;
  if (count_ == sequences_.size()) sequences_.emplace_back();
  sequences_[count_].position = std::ssize(request.tokens);
  ++count_;
}

std::span<const CudaFavour::Sequence> FavouredRequests::sequences() {
  for (std::size_t i = 0; i < count_; ++i) sequences_[i].lists = &lists_[i];
  return std::span(sequences_).first(count_);
}

}  // namespace specrt
