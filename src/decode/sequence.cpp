#include "decode/sequence.h"

#include <algorithm>

namespace specrt {

bool Sequence::is_stop(TokenId token) const {
  return std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) !=
         params.stop_token_ids.end();
}

namespace {

SourceCounters& counters_of(const std::string& source, SequenceCounters& counters) {
  for (SourceCounters& one : counters.sources) {
    if (one.source == source) return one;
  }
  return counters.sources.emplace_back(SourceCounters{source, 0, 0});
}

void count_sources(const Sequence& sequence, std::int64_t accepted, std::int64_t sign,
                   SequenceCounters& counters) {
  const DraftTree& draft = sequence.draft;
  if (draft.empty()) return;
  if (draft.sources().empty()) {
    SourceCounters& one = counters_of(draft.source(), counters);
    one.drafted += sign * static_cast<std::int64_t>(draft.size());
    one.accepted += sign * accepted;
    return;
  }
  const std::span<const std::int32_t> path(sequence.walk.path());
  for (std::size_t source = 0; source < draft.sources().size(); ++source) {
    SourceCounters& one = counters_of(draft.sources()[source], counters);
    const auto proposed = [&](std::int32_t node) {
      return sign * static_cast<std::int64_t>(draft.sources_of(node) >> source & 1u);
    };
    for (std::int32_t node = 0; node < static_cast<std::int32_t>(draft.size()); ++node) {
      one.drafted += proposed(node);
    }
    for (const std::int32_t node : path.first(static_cast<std::size_t>(accepted))) {
      one.accepted += proposed(node);
    }
  }
}

}  // namespace

bool was_truncated(const Sequence& sequence) {
  return sequence.pruned || sequence.walk.end() != WalkEnd::mismatch;
}

void count_round(const Sequence& sequence, std::int64_t emitted, bool truncated, std::int64_t sign,
                 SequenceCounters& counters) {
  const DraftTree& draft = sequence.draft;
  const std::int64_t accepted = emitted - 1;  // the last token is the target's own, always
  counters.rounds += sign;
  if (!draft.empty()) counters.drafts += sign;
  counters.drafted += sign * static_cast<std::int64_t>(draft.size());
  counters.accepted += sign * accepted;
  counters.tokens += sign * emitted;
  count_sources(sequence, accepted, sign, counters);
  if (truncated) {
    counters.truncated_rounds += sign;
    return;
  }
  counters.full_rounds += sign;
  counters.full_accepted += sign * accepted;
  const auto depth = static_cast<std::size_t>(draft.max_depth());
  if (counters.drafted_at.size() < depth) {
    counters.drafted_at.resize(depth);
    counters.accepted_at.resize(depth);
    counters.first_rejected_at.resize(depth);
  }
  for (std::size_t d = 0; d < depth; ++d) {
    counters.drafted_at[d] += sign;
    if (static_cast<std::int64_t>(d) < accepted) counters.accepted_at[d] += sign;
  }
  if (draft.has_children(sequence.walk.node())) {
    counters.first_rejections += sign;
    counters.first_rejected_at[static_cast<std::size_t>(accepted)] += sign;
  }
}

}  // namespace specrt
