#include <algorithm>
#include <cmath>
#include <limits>

#include "decode/head_drafter.h"
#include "specrt/error.h"

// What a draft head's rows say: the children of draft nodes, ranked on the host.

namespace specrt {

// Children of the nodes of level_ from `first` on, whose rows have just been run.
void HeadDrafter::expand(std::size_t first) {
  const auto vocab = static_cast<std::size_t>(runner_.config().vocab_size);
  while (first < level_.size()) {
    const std::size_t last =
        std::min(level_.size(), first + static_cast<std::size_t>(Runner::kLogitRows));
    logit_rows_.clear();
    for (std::size_t i = first; i < last; ++i) logit_rows_.push_back(level_[i].row);
    const std::span<const Runner::Candidate> likely =
        drafting_->likely(logit_rows_, options_.top_k);
    std::span<const float> logits;  // for those that ask for more
    for (std::size_t i = first; i < last; ++i) {
      const Row& row = level_[i];
      Active& a = *row.active;
      if (a.lost) continue;
      const SamplingParams& params = *a.request->sampling;
      const LogitsState* state = a.request->logits;
      try {
        if (params.greedy() && (state == nullptr || state->neutral())) {
          const auto k = static_cast<std::size_t>(options_.top_k);
          add_likely(row, likely.subspan((i - first) * k, k));
        } else {
          if (logits.empty()) logits = drafting_->likely_logits();
          add_processed(row, logits.subspan((i - first) * vocab, vocab));
        }
      } catch (const Error&) {
        // A head that has gone NaN, or is left nothing to say, costs drafts, not the request.
        a.lost = true;
        a.out->clear();
        a.out->set_source(options_.name);
      }
    }
    first = last;
  }
}

void HeadDrafter::add_likely(const Row& row, std::span<const Runner::Candidate> likely) {
  for (const Runner::Candidate& one : likely) {
    if (one.token < 0 || !std::isfinite(one.logit)) continue;
    const TokenId token = options_.target_of_draft.empty()
                              ? one.token
                              : options_.target_of_draft[static_cast<std::size_t>(one.token)];
    if (token < target_vocab_) row.active->tree.add(token, row.node, one.logit, one.logit);
  }
}

// One row of the head's logits by target id: what it cannot say is impossible.
std::span<const float> HeadDrafter::by_target_id(std::span<const float> logits) {
  if (options_.target_of_draft.empty()) {
    return logits.first(static_cast<std::size_t>(
        std::min(target_vocab_, static_cast<std::int64_t>(logits.size()))));
  }
  std::fill(by_target_.begin(), by_target_.end(), -std::numeric_limits<float>::infinity());
  for (std::size_t d = 0; d < logits.size(); ++d) {
    by_target_[static_cast<std::size_t>(options_.target_of_draft[d])] = logits[d];
  }
  return by_target_;
}

// Children where more counts than the head's own logits.
void HeadDrafter::add_processed(const Row& row, std::span<const float> own) {
  Active& a = *row.active;
  const SamplingParams& params = *a.request->sampling;
  LogitsState* state = a.request->logits;
  std::span<const float> logits = by_target_id(own);
  path_.clear();
  for (std::int32_t node = row.node; node >= 0;) {
    if (a.sampled) {
      path_.push_back(a.out->tokens()[static_cast<std::size_t>(node)]);
      node = a.out->parents()[static_cast<std::size_t>(node)];
    } else {
      path_.push_back(a.tree.token(node));
      node = a.tree.parent(node);
    }
  }
  if (state != nullptr && !state->neutral()) {
    // Tokens on the way count as history, for these logits alone.
    for (auto token = path_.rbegin(); token != path_.rend(); ++token) state->push(*token);
    try {
      logits = chooser_.processed(logits, *state, nullptr);
    } catch (...) {
      for (const TokenId token : path_) state->pop(token);
      throw;
    }
    for (const TokenId token : path_) state->pop(token);
  }
  const std::int64_t position = std::ssize(a.request->tokens) + std::ssize(path_);
  if (a.sampled) {
    add_draws(row, logits, position);
  } else if (params.greedy()) {
    chooser_.most_likely(logits, options_.top_k, likely_);
    for (const auto& [token, log_prob] : likely_) {
      if (std::isfinite(log_prob)) a.tree.add(token, row.node, log_prob, log_prob);
    }
  } else {
    add_favoured(row, logits, position);
  }
}

// The tokens that the target's own noise favours. What a child adds to the score is its share among
// its siblings of exp(log q + noise).
void HeadDrafter::add_favoured(const Row& row, std::span<const float> logits,
                               std::int64_t position) {
  Active& a = *row.active;
  const std::span<const Chooser::Pick> picks =
      chooser_.ranked(logits, *a.request->sampling, position, options_.top_k);
  double sum = 0.0;
  for (const Chooser::Pick& pick : picks) sum += picks.front().key / pick.key;
  for (const Chooser::Pick& pick : picks) {
    const double share = picks.front().key / pick.key / sum;
    a.tree.add(pick.token, row.node, static_cast<float>(std::log(share)), pick.log_prob);
  }
}

// As many draws without replacement as the tree's shape has children here.
void HeadDrafter::add_draws(const Row& row, std::span<const float> logits, std::int64_t position) {
  Active& a = *row.active;
  const SamplingParams& params = *a.request->sampling;
  const std::int32_t place = row.node < 0 ? DraftTree::kRoot : row.shape;
  std::int64_t children = 0;
  for (const std::int32_t parent : a.shape.parents()) children += parent == place ? 1 : 0;
  const std::span<const float> law = chooser_.distribution(logits, params);
  a.out->set_distribution(row.node, law);
  const std::uint32_t purpose = params.verification == Verification::block
                                    ? purpose_word(Purpose::draft, std::ssize(a.request->tokens))
                                    : purpose_word(Purpose::draft);
  const std::span<const Chooser::Pick> picks =
      chooser_.draws(law, params, position, purpose, children);
  for (std::size_t node = 0, rank = 0; node < a.shape.size() && rank < picks.size(); ++node) {
    if (a.shape.parents()[node] != place) continue;
    a.grown[node] = a.out->add(picks[rank].token, row.node, picks[rank].log_prob);
    ++rank;
  }
}

}  // namespace specrt
