#include <algorithm>
#include <string>

#include "decode/decoder_impl.h"

// How sequences share a pool that cannot hold all of them to their ends: blocks are set aside
// round by round, and a sequence can give up its own and be computed again later. What it was is
// in its tokens, and in what Sequence keeps: history and penalties, the constraint's state, what
// was told of the prompt, counters, brake. Noise is keyed by position, so there is none to restore.

namespace specrt {

// Positions that it may have committed after a round with so many tokens.
std::int64_t Decoder::Impl::positions_after(const Sequence& s, std::int64_t tokens) const {
  if (s.prefilling()) return s.processed + std::min(tokens, s.prefill_tokens - s.processed);
  return s.length() + std::min(tokens, s.tokens_left() - 1);
}

std::optional<SequenceId> Decoder::Impl::reserve(const Plan& plan) {
  for (const PlanItem& item : plan) {
    const Sequence& s = *by_id.at(item.id);
    if (s.tokens_left() == 0) continue;  // max_tokens = 0: it will not run
    if (!runner.cache().reserve(s.id, positions_after(s, item.tokens))) return s.id;
  }
  return std::nullopt;
}

std::optional<SequenceId> Decoder::reserve(const Plan& plan) {
  Impl& d = *impl_;
  d.require_between_rounds("reserve");
  d.check_plan(plan);
  return d.reserve(plan);
}

std::int64_t Decoder::Impl::positions_at_first(const Sequence& s, std::int64_t reserve) const {
  const std::int64_t most = kv_positions(s.max_length);
  return reserve >= 0 && reserve < most - s.length() ? s.length() + reserve : most;
}

// Puts a sequence with its drafter into the cache, as much of it as is known there.
void Decoder::Impl::enter(Sequence& s, std::int64_t positions) {
  std::int64_t known = s.prefill_tokens;
  if (s.drafter != nullptr) {
    // Skipped positions leave no features, so a hit goes no further than the drafter can follow.
    known = std::clamp<std::int64_t>(s.drafter->known_positions(s.id), 0, known);
  }
  // Prompt log-probabilities need every row of the prompt, so nothing of it may be skipped.
  if (s.params.prompt_logprobs >= 0 && !s.prompt_told) known = 0;
  // The last token given is always computed.
  const std::int64_t given = std::min(s.prefill_tokens, known + (known > 0 ? 1 : 0));
  s.processed = runner.cache().add(
      s.id, positions, std::span<const TokenId>(s.tokens).first(static_cast<std::size_t>(given)));
}

void Decoder::preempt(SequenceId id) {
  Impl& d = *impl_;
  d.require_between_rounds("preempt");
  Sequence& s = d.find(id);
  const auto at =
      std::find_if(d.live.begin(), d.live.end(), [&](const auto& one) { return one.get() == &s; });
  if (s.drafter != nullptr) {
    try {
      s.drafter_kept = s.drafter->suspend(id);
    } catch (...) {
      s.finish = Finish::error;
      d.retire();
      throw;
    }
  }
  d.runner.cache().remove(id);
  s.prefill_tokens = s.length() > s.prompt_tokens ? s.length() - 1 : s.prompt_tokens;
  s.processed = 0;
  if (!s.prompt_told) s.prompt_logprobs.clear();
  ++s.counters.preemptions;
  ++d.totals.counters.preemptions;
  d.by_id.erase(id);
  d.preempted.push_back(std::move(*at));
  d.live.erase(at);
}

// A preempted one is over: its drafter may have kept something.
void Decoder::Impl::leave(Sequence& s) noexcept {
  if (s.drafter == nullptr || !s.drafter_kept) return;
  try {
    s.drafter->release(s.id);
  } catch (...) {  // its own loss
  }
}

bool Decoder::can_resume(SequenceId id, std::int64_t reserve) const {
  Impl& d = *impl_;
  const std::int64_t positions = d.positions_at_first(**d.find_preempted(id), reserve);
  return std::ssize(d.live) < d.options.max_batch_size && d.runner.cache().can_add(positions);
}

void Decoder::resume(SequenceId id, std::int64_t reserve) {
  Impl& d = *impl_;
  d.require_between_rounds("resume");
  const auto at = d.find_preempted(id);
  Sequence& s = **at;
  if (!can_resume(id, reserve)) {
    throw CapacityError(expected_got(
        "kv cache",
        "a place, and blocks for " + std::to_string(d.positions_at_first(s, reserve)) + " tokens",
        std::to_string(d.live.size()) + " sequences running and " +
            std::to_string(free_kv_tokens()) + " tokens free"));
  }
  d.by_id.emplace(id, &s);
  d.live.push_back(std::move(*at));
  d.preempted.erase(at);
  bool entered = false;
  try {
    if (s.drafter != nullptr) {
      if (s.drafter_kept) {
        s.drafter->resume(id, s.tokens, s.max_length);
      } else {
        s.drafter->admit(id, s.tokens, s.max_length);
      }
    }
    entered = true;
    d.enter(s, d.positions_at_first(s, reserve));
  } catch (...) {
    // Its drafter's mistake ends it, and what the drafter keeps of it.
    if (s.drafter != nullptr && (entered || s.drafter_kept)) {
      try {
        s.drafter->release(id);
      } catch (...) {  // the first mistake is the one to tell of
      }
    }
    d.by_id.erase(id);
    d.live.pop_back();
    throw;
  }
}

}  // namespace specrt
