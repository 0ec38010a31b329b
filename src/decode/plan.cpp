#include <algorithm>

#include "specrt/decoder.h"
#include "specrt/error.h"

namespace specrt {

Plan plan_fixed(const Decoder& decoder, std::int64_t num_speculative_tokens) {
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
  rows -= nodes * drafting;
  Plan plan;
  for (const SequenceState& state : states) {
    if (state.prompt_left > 0) {
      const std::int64_t chunk = std::min(rows, state.prompt_left);
      rows -= chunk;
      if (chunk > 0) plan.push_back({state.id, chunk});
    } else {
      plan.push_back({state.id, state.has_drafter ? nodes : 0});
    }
  }
  return plan;
}

}  // namespace specrt
