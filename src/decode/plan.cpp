#include <algorithm>

#include "specrt/decoder.h"
#include "specrt/error.h"

namespace specrt {
namespace {

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
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].prompt_left == 0) continue;
    plan[i].tokens = std::min(rows, states[i].prompt_left);
    rows -= plan[i].tokens;
  }
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
