#include <algorithm>
#include <numeric>
#include <optional>

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

/// How many draft nodes each state may have: what it asks for, where all of it fits, else an even
/// share of `rows`.
std::vector<std::int64_t> shares(const std::vector<SequenceState>& states,
                                 std::int64_t num_speculative_tokens, std::int64_t rows) {
  std::vector<std::int64_t> out(states.size(), 0);
  std::vector<std::size_t> drafting;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const SequenceState& state = states[i];
    if (state.prompt_left > 0 || !state.has_drafter) continue;
    out[i] =
        state.num_speculative_tokens < 0 ? num_speculative_tokens : state.num_speculative_tokens;
    drafting.push_back(i);
  }
  // Whoever asks for less than an even share leaves the rest to the others.
  std::stable_sort(drafting.begin(), drafting.end(),
                   [&](std::size_t a, std::size_t b) { return out[a] < out[b]; });
  auto left = static_cast<std::int64_t>(drafting.size());
  for (const std::size_t i : drafting) {
    out[i] = std::min(out[i], rows / left--);
    rows -= out[i];
  }
  return out;
}

// A policy that looks at clocks or at other sequences has no say where the draft has one in the
// text: there a seed repeats what it gave.
Policy policy_of(const SequenceState& state, std::optional<Policy> policy) {
  const Policy asked = policy.value_or(state.policy);
  const bool looks_around = asked == Policy::goodput || asked == Policy::ema_tiers;
  return looks_around && state.draft_changes_text ? Policy::brake : asked;
}

// Under each sequence's own policy, or one for all.
Plan plan_under(const Decoder& decoder, std::int64_t num_speculative_tokens,
                std::optional<Policy> policy) {
  if (num_speculative_tokens < 0) {
    throw InvalidArgument(expected_got("num_speculative_tokens", "at least 0",
                                       std::to_string(num_speculative_tokens)));
  }
  const std::vector<SequenceState> states = decoder.sequences();
  std::int64_t decoding = 0;
  for (const SequenceState& state : states) decoding += state.prompt_left > 0 ? 0 : 1;
  const bool prefilling = decoding < static_cast<std::int64_t>(states.size());
  // Every decoding sequence has its row first, drafts share what is left (not all of it while a
  // prompt waits), prefill takes the rest.
  std::int64_t rows = decoder.max_rows() - decoding;
  const std::vector<std::int64_t> most =
      shares(states, num_speculative_tokens, prefilling ? rows * 3 / 4 : rows);
  Plan plan;
  std::vector<std::int64_t> left_to_choose(states.size(), 0);
  std::vector<std::int64_t> chosen(states.size(), 0);
  for (std::size_t i = 0; i < states.size(); ++i) {
    plan.push_back({states[i].id, 0});
    if (most[i] == 0) continue;
    switch (policy_of(states[i], policy)) {
      case Policy::fixed:
      case Policy::adasd:  // its drafter stops by itself
        plan.back().tokens = most[i];
        break;
      case Policy::brake:
        plan.back().tokens = decoder.draft_limit(states[i].id, most[i]);
        break;
      case Policy::ema_tiers:
        plan.back().tokens = std::min(most[i], decoder.ema_steps());
        break;
      case Policy::goodput:
        left_to_choose[i] = most[i];
        break;
      case Policy::off:
        break;
    }
    chosen[i] = plan.back().tokens;
    rows -= chosen[i];
  }
  std::int64_t prompt_tokens = 0;
  for (const SequenceState& state : states) prompt_tokens += state.prompt_left;
  const std::int64_t prompts = decoder.prompt_limit(std::min(rows, prompt_tokens));
  if (std::any_of(left_to_choose.begin(), left_to_choose.end(), [](auto n) { return n > 0; })) {
    // Rows that drafts take from prompts have to be run later: they cost as if they came on top.
    const std::vector<std::int64_t> nodes = decoder.allocate(left_to_choose, chosen, prompts);
    for (std::size_t i = 0; i < states.size(); ++i) {
      plan[i].tokens += nodes[i];
      rows -= nodes[i];
    }
  }
  share_prefill(states, std::min(rows, prompts), plan);
  std::size_t at = 0;
  std::erase_if(
      plan, [&](const PlanItem& item) { return states[at++].prompt_left > 0 && item.tokens == 0; });
  return plan;
}

}  // namespace

Plan plan_policies(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_under(decoder, num_speculative_tokens, std::nullopt);
}

Plan plan_goodput(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_under(decoder, num_speculative_tokens, Policy::goodput);
}

Plan plan_fixed(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_under(decoder, num_speculative_tokens, Policy::fixed);
}

Plan plan_braked(const Decoder& decoder, std::int64_t num_speculative_tokens) {
  return plan_under(decoder, num_speculative_tokens, Policy::brake);
}

}  // namespace specrt
