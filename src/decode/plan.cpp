#include <algorithm>

#include "specrt/decoder.h"
#include "specrt/error.h"

namespace specrt {
namespace {

// Every prompt gets the same share of the rows, or what it still needs where that is less; what is
// left over goes to those that came first. So a long prompt holds up no short one behind it.
void share_prefill(const std::vector<SequenceState>& states, std::int64_t rows, Plan& plan) {
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].prompt_left > 0) open.push_back(i);
  }
  while (!open.empty() && rows > 0) {
    const std::int64_t share = std::max<std::int64_t>(1, rows / std::ssize(open));
    for (const std::size_t i : open) {
      const std::int64_t more = std::min({share, states[i].prompt_left - plan[i].tokens, rows});
      plan[i].tokens += more;
      rows -= more;
    }
    std::erase_if(open, [&](std::size_t i) { return plan[i].tokens == states[i].prompt_left; });
  }
}

// `limit` says how many draft nodes a sequence takes of those that it may have.
template <typename Limit>
Plan plan_up_to(const Decoder& decoder, std::int64_t num_speculative_tokens, const Limit& limit) {
  if (num_speculative_tokens < 0) {
    throw InvalidArgument(expected_got("num_speculative_tokens", "at least 0",
                                       std::to_string(num_speculative_tokens)));
  }
  const std::vector<SequenceState> states = decoder.sequences();
  std::int64_t decoding = 0;
  bool prefilling = false;
  std::int64_t drafting = 0;
  for (const SequenceState& state : states) {
    if (state.prompt_left > 0) {
      prefilling = true;
      continue;
    }
    ++decoding;
    if (state.has_drafter) ++drafting;
  }
  // Every decoding sequence has its row first, drafts share what is left (not all of it while a
  // prompt waits), prefill takes the rest.
  std::int64_t rows = decoder.max_rows() - decoding;
  const std::int64_t for_drafts = prefilling ? rows * 3 / 4 : rows;
  const std::int64_t nodes =
      drafting == 0 ? 0 : std::min(num_speculative_tokens, for_drafts / drafting);
  Plan plan;
  for (const SequenceState& state : states) {
    plan.push_back({state.id, 0});
    if (state.prompt_left > 0 || !state.has_drafter) continue;
    plan.back().tokens = limit(state.id, nodes);
    rows -= plan.back().tokens;
  }
  share_prefill(states, rows, plan);
  std::size_t at = 0;
  std::erase_if(
      plan, [&](const PlanItem& item) { return states[at++].prompt_left > 0 && item.tokens == 0; });
  return plan;
}

}  // namespace

Plan plan_fixed(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_up_to(decoder, num_speculative_tokens,
                    [](SequenceId, std::int64_t nodes) { return nodes; });
}

Plan plan_braked(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_up_to(decoder, num_speculative_tokens, [&](SequenceId id, std::int64_t nodes) {
    return decoder.draft_limit(id, nodes);
  });
}

}  // namespace specrt
