#include <algorithm>
#include <cmath>
#include <numeric>

#include "decode/decoder_impl.h"

// Policy `goodput` inside a decoder: what it knows of drafts and costs, and the two choices that
// rest on it, before drafting and behind it.

namespace specrt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kHopedFor = 0.9;          // acceptance for which a probe would have to pay
constexpr std::int64_t kOneMore = 16;      // one round in so many is trimmed to one node more
constexpr double kFree = 0.01;             // of a pass: drafting that takes less costs nothing
constexpr std::size_t kMostDrafters = 64;  // records of; beyond, the last one is shared
constexpr std::int64_t kPaceTokens = 16;   // within which who is behind is to be in time again
constexpr double kOnTime = 0.9;            // of a target: rounds differ, and the last ones count
constexpr double kUneven = 1.1;    // rounds take longer than costs say, and some have drafts
constexpr double kMostHeld = 1.0;  // seconds that a prompt waits for others' targets
constexpr std::int64_t kLeastPrompt = 32;  // rows of prompts that a round is made longer for
constexpr double kForget = 63.0 / 64.0;    // of recent rounds, each round

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

bool is_chain(const DraftTree& draft) {
  for (std::size_t node = 0; node < draft.size(); ++node) {
    if (draft.parents()[node] != static_cast<std::int32_t>(node) - 1) return false;
  }
  return true;
}

// Drafters without confidences leave log-probabilities out, or at 0.
bool has_confidences(const DraftTree& draft) {
  return std::any_of(draft.log_probs().begin(), draft.log_probs().end(),
                     [](float log_prob) { return log_prob != 0.0f; });
}

std::int64_t depth_of(std::int64_t nodes, double width) {
  return static_cast<std::int64_t>(std::ceil(static_cast<double>(nodes) / width));
}

// What a draft is expected to bring of which nothing but its depth is looked at.
double expected_of(const Sequence& s) {
  std::int32_t depth = 0;
  for (const std::int32_t one : s.draft.depths()) depth = std::max(depth, one);
  return s.expected.expected(depth);
}

}  // namespace

const Decoder::Impl::DrafterRecord* Decoder::Impl::known_record(const std::string& name) const {
  const auto found = std::find_if(records.begin(), records.end(),
                                  [&](const DrafterRecord& one) { return one.name == name; });
  return found != records.end() ? &*found : nullptr;
}

Decoder::Impl::DrafterRecord* Decoder::Impl::record_of(const std::string& name) {
  if (const DrafterRecord* known = known_record(name)) {
    return &records[static_cast<std::size_t>(known - records.data())];
  }
  if (records.size() < kMostDrafters) {
    records.emplace_back();
    records.back().name = name;
  }
  return &records.back();
}

std::int64_t Decoder::Impl::decoding() const {
  return std::count_if(live.begin(), live.end(), [](const auto& s) { return !s->prefilling(); });
}

// Its target as allocate_drafts() takes it: as long as prompts take their share of the time, rounds
// without any have to be faster.
void Decoder::Impl::set_pace(const Sequence& s, Clock::time_point now, DraftCandidate& one) const {
  const double target = kOnTime * s.params.speculation.target_tpot_seconds;
  if (target <= 0.0) return;
  const double others = recent_seconds > 0.0 ? recent_prompt_seconds / recent_seconds : 0.0;
  const double elapsed = seconds_between(s.first_token, now);
  const std::int64_t left = std::max<std::int64_t>(1, s.tokens_left());
  const auto within = [&](std::int64_t window) {
    return (1.0 - others) * pace_of(target, elapsed, s.counters.tokens - 1, window);
  };
  one.pace_seconds = within(std::min(left, kPaceTokens));
  one.hope_seconds = within(left);
}

// Those that have a target and nothing to choose are slowed by others' drafts all the same.
bool Decoder::Impl::add_paced(const Sequence& s, double tokens, Clock::time_point now) const {
  DraftCandidate one;
  set_pace(s, now, one);
  if (one.pace_seconds <= 0.0) return false;
  one.tokens = tokens;
  paced.push_back(one);
  return true;
}

// What running sequences ask for that follow the tiers; -1: they say nothing.
std::int64_t Decoder::Impl::ema_initial() const {
  std::int64_t most = -1;
  for (const auto& s : live) {
    if (s->params.speculation.policy == Policy::ema_tiers) {
      most = std::max(most, s->params.speculation.num_speculative_tokens);
    }
  }
  return most;
}

std::int64_t Decoder::ema_steps() const {
  return impl_->tiers.steps(impl_->decoding(), impl_->ema_initial());
}

// What became of one draft, for the sequence itself and as a guess for later ones.
void Decoder::Impl::record(Sequence& s, std::int64_t accepted, bool rejected) {
  if (s.draft.empty() && s.trimmed < 0.0) return;
  DrafterRecord& known = *record_of(s.drafter->name());
  if (s.trimmed >= 0.0 && !rejected) {
    s.expected.observe_cut(accepted, s.trimmed);
    known.acceptance.observe_cut(accepted, s.trimmed);
  } else {
    s.expected.observe(accepted, rejected);
    known.acceptance.observe(accepted, rejected);
  }
  if (!has_confidences(s.draft) || s.params.speculation.synthetic()) return;
  known.confident = true;
  const std::vector<std::int32_t>& taken = s.walk.path();
  const auto is_on_path = [&](std::int32_t node) {
    return std::binary_search(taken.begin(), taken.end(), node);
  };
  for (std::size_t node = 0; node < s.draft.size(); ++node) {
    const std::int32_t parent = s.draft.parents()[node];
    if (parent != DraftTree::kRoot && !is_on_path(parent)) continue;
    known.calibration.observe(std::exp(double{s.draft.log_probs()[node]}),
                              is_on_path(static_cast<std::int32_t>(node)));
  }
}

// After the pass, before anything of it is entered.
void Decoder::Impl::observe_round(double seconds) {
  std::int64_t sequences = 0;
  std::int64_t context = 0;
  std::int64_t steps = 0;
  std::int64_t tiered = 0;
  std::int64_t tier_accepted = 0;
  std::int64_t prompt_rows = 0;
  bool decodes = false;
  for (const auto& s : live) {
    if (!s->in_pass || s->finish != Finish::none) continue;
    ++sequences;
    context += s->length();
    prompt_rows += s->prompt_rows;
    decodes = decodes || !s->prefilling();
    if (s->prefilling() || s->drafter == nullptr) continue;
    if (s->params.speculation.policy == Policy::ema_tiers && !s->params.draft_changes_text()) {
      ++tiered;
      tier_accepted += std::ssize(s->walk.emitted()) - 1;
    }
  }
  if (tiered > 0) {
    tiers.observe(decoding(), ema_initial(),
                  static_cast<double>(tier_accepted) / static_cast<double>(tiered));
  }
  if (sequences > 0) {
    const std::int64_t rows = whole_rows(runner.rows(), prompt_rows);
    cost.observe_pass(rows, sequences, context, seconds);
    if (decodes) {
      const double share =
          prompt_seconds(runner.rows() - prompt_rows, prompt_rows, sequences, context) /
          cost.pass_seconds(rows, sequences, context);
      recent_seconds = kForget * recent_seconds + seconds;
      recent_prompt_seconds = kForget * recent_prompt_seconds + share * seconds;
    }
  }
  if (drafting.empty()) return;
  for (const Sequence* s : drafting) {
    // The first draft of a sequence runs its prompt as well.
    if (s->counters.drafted == 0 || s->drafter->name() != drafting.front()->drafter->name()) return;
    steps = std::max(steps, static_cast<std::int64_t>(std::ceil(static_cast<double>(s->asked) /
                                                                std::max(1.0, s->brake.width()))));
  }
  const Sequence& first = *drafting.front();
  cost.observe_draft(first.drafter->name(), first.step_cost, steps, std::ssize(drafting),
                     draft_seconds);
}

// Rows of prompts need no logits: so many rows with them cost the same.
std::int64_t Decoder::Impl::whole_rows(std::int64_t rows, std::int64_t prompt_rows) const {
  const auto saved = static_cast<std::int64_t>(head_share * static_cast<double>(prompt_rows));
  return std::max<std::int64_t>(1, rows - saved);
}

// What prompts take of a pass, beside so many rows of others.
double Decoder::Impl::prompt_seconds(std::int64_t rows, std::int64_t prompt_rows,
                                     std::int64_t sequences, std::int64_t context) const {
  if (prompt_rows == 0) return 0.0;
  const double with =
      cost.pass_seconds(whole_rows(rows + prompt_rows, prompt_rows), sequences, context);
  return std::max(0.0,
                  with - cost.pass_seconds(std::max<std::int64_t>(1, rows), sequences, context));
}

// Drafts that cost nothing and say what they are worth are better chosen from when they are there.
bool Decoder::Impl::trims_freely(const Sequence& s) const {
  if (s.params.speculation.synthetic()) return false;
  const DrafterRecord* known = known_record(s.drafter->name());
  return known != nullptr && known->confident &&
         cost.draft_seconds(s.drafter->name(), s.step_cost, 1, std::ssize(live)) <
             kFree * cost.pass_seconds(1, 1, 0);
}

// Passes of so many rows, of prompts beside them, and 0 to `most` draft nodes. Returns what the
// prompts take of each.
double Decoder::Impl::fill_pass_costs(std::int64_t rows, std::int64_t prompt_rows,
                                      std::int64_t most) const {
  std::int64_t context = 0;
  for (const auto& s : live) context += s->length();
  const std::int64_t base = whole_rows(rows + prompt_rows, prompt_rows);
  pass_costs.clear();
  double longest = 0.0;
  for (std::int64_t n = 0; n <= most; ++n) {
    longest = std::max(longest, cost.pass_seconds(base + n, std::ssize(live), context));
    pass_costs.push_back(longest);
  }
  return prompt_seconds(rows, prompt_rows, std::ssize(live), context);
}

// What the round may take for every waiting prompt to be in time.
double Decoder::Impl::round_limit(std::int64_t prompt_rows, Clock::time_point now) const {
  double limit = 0.0;
  for (const auto& s : live) {
    const double target = s->params.speculation.target_ttft_seconds;
    // One that was preempted later has had its first token.
    if (!s->prefilling() || s->counters.tokens > 0 || target <= 0.0) continue;
    const std::int64_t left = s->prompt_tokens - s->processed;
    const std::int64_t rows = std::max<std::int64_t>(1, std::min(left, prompt_rows));
    const auto rounds = static_cast<double>((left + rows - 1) / rows);
    const double slack = std::max(1e-9, target - seconds_between(s->arrived, now)) / rounds;
    limit = limit == 0.0 ? slack : std::min(limit, slack);
  }
  return limit;
}

// Whoever decodes has so much time to spare for prompts as its own rounds, without drafts, leave of
// its target. A prompt waits for that no longer than its own target allows, or, where it has none,
// than kMostHeld; then prompts get half of the time, which makes the others half as fast at worst.
std::int64_t Decoder::prompt_limit(std::int64_t rows) const {
  const Impl& d = *impl_;
  const Clock::time_point now = Clock::now();
  std::int64_t context = 0;
  std::int64_t decoding = 0;
  for (const auto& s : d.live) {
    context += s->length();
    decoding += s->prefilling() ? 0 : 1;
  }
  const auto taken = [&](std::int64_t prompt_rows) {
    return d.prompt_seconds(decoding, prompt_rows, std::ssize(d.live), context);
  };
  const double without =
      d.cost.pass_seconds(std::max<std::int64_t>(1, decoding), std::ssize(d.live), context);
  double spare = -1.0;  // anything
  bool held = false;    // for long enough
  for (const auto& s : d.live) {
    if (s->prefilling()) {
      // One that was preempted is late already.
      const double own = s->params.speculation.target_ttft_seconds;
      const double waited = seconds_between(s->arrived, now);
      if (s->counters.tokens > 0 || (own > 0.0 && waited > 0.5 * own)) return rows;
      held = held || waited > kMostHeld;
      continue;
    }
    const double target = s->params.speculation.target_tpot_seconds;
    if (target <= 0.0) continue;
    const auto left = static_cast<double>(std::max<std::int64_t>(1, s->tokens_left()));
    const double whole = target * (static_cast<double>(s->counters.tokens - 1) + left);
    const double elapsed = seconds_between(s->first_token, now);
    if (elapsed + left * without > whole) continue;  // late, whether they wait or not
    const double slack = std::max(0.0, kOnTime * whole - elapsed - kUneven * left * without);
    spare = spare < 0.0 ? slack : std::min(spare, slack);
  }
  if (held && spare >= 0.0) spare = std::max(spare, without);
  if (spare < 0.0 || taken(rows) <= spare) return rows;
  // A pass with very few of them is hardly shorter than one with more.
  std::int64_t fits = held ? std::min(rows, kLeastPrompt) : 0;
  for (std::int64_t more = kLeastPrompt; more < rows; more += kLeastPrompt) {
    if (taken(more) > spare) break;
    fits = more;
  }
  return fits;
}

std::vector<std::int64_t> Decoder::allocate(std::span<const std::int64_t> most,
                                            std::span<const std::int64_t> others,
                                            std::int64_t prompt_rows) const {
  const Impl& d = *impl_;
  for (const auto& [name, given] : {std::pair{"most", most}, std::pair{"others", others}}) {
    if (given.size() == d.live.size()) continue;
    throw InvalidArgument(expected_got(name, std::to_string(d.live.size()) + " numbers",
                                       std::to_string(given.size())));
  }
  std::vector<std::int64_t> out(most.size(), 0);
  const Clock::time_point now = Clock::now();
  std::int64_t total = 0;
  std::int64_t given = 0;     // nodes that are no choice
  double given_tokens = 0.0;  // what they are expected to bring
  double given_seconds = 0.0;
  std::size_t deepest = 0;
  std::vector<DraftCandidate> candidates;
  std::vector<std::size_t> which;
  std::vector<std::size_t> first_gain;
  std::vector<Impl::DrafterUse> drafters;
  const auto use_of = [&drafters](const Sequence& s) -> Impl::DrafterUse& {
    for (Impl::DrafterUse& one : drafters) {
      if (one.of->drafter->name() == s.drafter->name()) return one;
    }
    return drafters.emplace_back(Impl::DrafterUse{&s});
  };
  d.node_gains.clear();
  d.paced.clear();
  for (std::size_t i = 0; i < most.size(); ++i) {
    const Sequence& s = *d.live[i];
    if (s.prefilling()) continue;
    if (s.drafter == nullptr) {
      (void)d.add_paced(s, 1.0, now);
      continue;
    }
    // Deeper nodes could never be used.
    const double width = std::max(1.0, s.brake.width());
    const std::int64_t reach = std::max<std::int64_t>(0, s.tokens_left() - 1);
    // While prompts wait, rows that a draft may take are theirs otherwise.
    const bool trimmed_later = most[i] > 0 && prompt_rows == 0 && d.trims_freely(s);
    if (trimmed_later) out[i] = most[i];
    if (const std::int64_t nodes = trimmed_later ? most[i] : others[i]; nodes > 0) {
      const std::int64_t depth = std::min(depth_of(nodes, width), reach);
      given += nodes;
      const double tokens = s.expected.expected(depth);
      if (!d.add_paced(s, 1.0 + tokens, now)) given_tokens += tokens;
      given_seconds +=
          static_cast<double>(depth) * d.cost.draft_of(s.drafter->name(), s.step_cost).sequence;
      Impl::DrafterUse& use = use_of(s);
      use.given = std::max(use.given, depth);
      continue;
    }
    if (most[i] <= 0) {
      (void)d.add_paced(s, 1.0, now);
      continue;
    }
    DraftCandidate one;
    one.width = width;
    const auto useful = static_cast<std::int64_t>(std::ceil(width * static_cast<double>(reach)));
    const std::int64_t nodes = std::min(most[i], useful);
    first_gain.push_back(d.node_gains.size());
    double reached = 1.0;
    std::int64_t depth = 0;
    for (std::int64_t place = 0; place < nodes; ++place) {
      const auto at = static_cast<std::int64_t>(static_cast<double>(place) / one.width) + 1;
      for (; depth < at; ++depth) reached *= s.expected.alpha(depth + 1);
      d.node_gains.push_back(reached / one.width);
    }
    deepest = std::max(deepest, static_cast<std::size_t>(depth));
    d.set_pace(s, now, one);
    one.node_seconds = d.cost.draft_of(s.drafter->name(), s.step_cost).sequence / one.width;
    total += nodes;
    candidates.push_back(one);
    which.push_back(i);
    use_of(s).chosen = true;
  }
  if (candidates.empty()) return out;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const std::size_t end = i + 1 < candidates.size() ? first_gain[i + 1] : d.node_gains.size();
    candidates[i].gains = std::span(d.node_gains).subspan(first_gain[i], end - first_gain[i]);
  }
  candidates.insert(candidates.end(), d.paced.begin(), d.paced.end());
  const std::int64_t decoding = d.decoding();
  const double aside = d.fill_pass_costs(decoding + given, prompt_rows, total);
  d.draft_costs.assign(deepest + 1, given_seconds);
  for (const Impl::DrafterUse& use : drafters) {
    const CostModel::Draft cost = d.cost.draft_of(use.of->drafter->name(), use.of->step_cost);
    for (std::size_t depth = 0; depth <= deepest; ++depth) {
      const std::int64_t steps =
          std::max(use.given, use.chosen ? static_cast<std::int64_t>(depth) : 0);
      if (steps > 0) d.draft_costs[depth] += cost.call + static_cast<double>(steps) * cost.step;
    }
  }
  const RoundCosts costs{d.pass_costs, d.draft_costs, d.round_limit(prompt_rows, now), aside};
  const Allocation best = allocate_drafts(
      candidates, costs, static_cast<double>(decoding - std::ssize(candidates)) + given_tokens);
  for (std::size_t i = 0; i < which.size(); ++i) out[which[i]] = best.nodes[i];
  d.add_probes(which, best, aside, out);
  return out;
}

// Sequences that get nothing are tried again now and then, where a draft that succeeds would pay.
void Decoder::Impl::add_probes(std::span<const std::size_t> which, const Allocation& best,
                               double aside, std::vector<std::int64_t>& out) const {
  std::int64_t given = 0;
  std::int64_t idle = 0;
  for (std::size_t i = 0; i < which.size(); ++i) {
    given += best.nodes[i];
    idle += best.nodes[i] == 0 ? 1 : 0;
  }
  if (idle == 0 || best.missed > 0 || draft_costs.size() < 2) return;
  const auto at = [&](std::int64_t n) {
    return pass_costs[static_cast<std::size_t>(std::min(n, std::ssize(pass_costs) - 1))];
  };
  const double more =
      at(given + idle) - at(given) + (given == 0 ? draft_costs[1] - draft_costs[0] : 0.0);
  const double hoped = kHopedFor * static_cast<double>(idle);
  const double seconds = best.seconds - aside;
  if ((best.tokens + hoped) * seconds <= best.tokens * (seconds + more)) return;
  const DraftCost share{more / seconds, 0.0};
  for (std::size_t i = 0; i < which.size(); ++i) {
    if (best.nodes[i] == 0 && live[which[i]]->brake.probe_due(share)) out[which[i]] = 1;
  }
}

// With the drafts at hand their confidences say more than averages did: the least likely nodes go
// where the pass is cheaper without them by more than they would bring.
void Decoder::Impl::trim() {
  std::int64_t total = 0;
  std::int64_t rows = 0;
  std::int64_t prompt_rows = 0;
  double given_tokens = 0.0;  // of drafts that are no choice
  candidates.clear();
  trimmed_of.clear();
  paced.clear();
  const Clock::time_point now = Clock::now();
  for (const auto& s : live) {
    if (!s->in_pass || s->finish != Finish::none) continue;
    if (s->prefilling()) {
      prompt_rows += std::min(s->planned, s->prefill_tokens - s->processed);
    } else {
      rows += 1 + std::ssize(s->draft.tokens());
    }
    const bool may = s->params.speculation.policy == Policy::goodput && !s->draft.empty() &&
                     !s->params.draft_changes_text() && !s->params.speculation.synthetic() &&
                     has_confidences(s->draft);
    if (!may) {
      if (s->prefilling()) continue;
      const double tokens = s->drafter == nullptr ? 0.0 : expected_of(*s);
      if (!add_paced(*s, 1.0 + tokens, now)) given_tokens += tokens;
      continue;
    }
    total += std::ssize(s->draft.tokens());
    trimmed_of.push_back(s.get());
  }
  if (trimmed_of.empty()) return;
  node_gains.clear();
  node_order.clear();
  for (const Sequence* s : trimmed_of) {
    const Calibration& calibration = record_of(s->drafter->name())->calibration;
    const DraftTree& draft = s->draft;
    const auto start = static_cast<std::ptrdiff_t>(node_order.size());
    survival.clear();
    for (std::size_t node = 0; node < draft.size(); ++node) {
      const std::int32_t parent = draft.parents()[node];
      const double above = parent < 0 ? 1.0 : survival[static_cast<std::size_t>(parent)];
      survival.push_back(above * calibration.acceptance(std::exp(double{draft.log_probs()[node]}),
                                                        s->expected.alpha(draft.depths()[node])));
      node_order.push_back(static_cast<std::int32_t>(node));
    }
    std::stable_sort(
        node_order.begin() + start, node_order.end(), [&](std::int32_t a, std::int32_t b) {
          return survival[static_cast<std::size_t>(a)] > survival[static_cast<std::size_t>(b)];
        });
    for (auto at = node_order.begin() + start; at != node_order.end(); ++at) {
      node_gains.push_back(survival[static_cast<std::size_t>(*at)]);
    }
    DraftCandidate one;
    one.width = static_cast<double>(draft.size());  // drafted already: depth costs nothing
    set_pace(*s, now, one);
    candidates.push_back(one);
  }
  std::size_t first = 0;
  for (std::size_t i = 0; i < trimmed_of.size(); ++i) {
    const std::size_t size = trimmed_of[i]->draft.size();
    candidates[i].gains = std::span(node_gains).subspan(first, size);
    first += size;
  }
  candidates.insert(candidates.end(), paced.begin(), paced.end());
  const double aside = fill_pass_costs(rows - total, prompt_rows, total);
  constexpr double kDrafted[] = {0.0, 0.0};
  const Allocation best =
      allocate_drafts(candidates, {pass_costs, kDrafted, 0.0, aside},
                      static_cast<double>(decoding() - std::ssize(candidates)) + given_tokens);
  first = 0;
  for (std::size_t i = 0; i < trimmed_of.size(); ++i) {
    Sequence& s = *trimmed_of[i];
    const std::size_t size = s.draft.size();
    // What lies behind is seen now and then, so that it can turn out to be better than believed.
    const std::size_t more = s.counters.rounds % kOneMore == 0 ? 1 : 0;
    const std::size_t kept = static_cast<std::size_t>(best.nodes[i]) + more;
    if (kept < size) {
      if (is_chain(s.draft)) {
        const double above = kept == 0 ? 1.0 : candidates[i].gains[kept - 1];
        s.trimmed = above > 0.0 ? candidates[i].gains[kept] / above : 0.0;
      }
      std::vector<bool> marks(size, false);
      for (std::size_t k = 0; k < kept; ++k) {
        marks[static_cast<std::size_t>(node_order[first + k])] = true;
      }
      s.draft.keep(marks);
      s.pruned = false;
    }
    first += size;
  }
}

const CostModel& Decoder::cost_model() const { return impl_->cost; }

void Decoder::set_cost_model(CostModel model) { impl_->cost = std::move(model); }

void Decoder::set_draft_cost(const std::string& drafter, const CostModel::Draft& cost) {
  impl_->cost.set_draft(drafter, cost);
}

}  // namespace specrt
