#include <algorithm>
#include <unordered_set>

#include "cpu/dispatch.h"
#include "decode/decoder_impl.h"

// One round: propose, lay out the pass, run it, walk the drafts, commit.

namespace specrt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What verification relies on, so that a drafter's mistake ends its own request and no other.
void check_draft(const DraftTree& draft, const SamplingParams& params, std::int64_t vocab_size) {
  draft.check_vocabulary(vocab_size);
  const auto size = static_cast<std::int32_t>(draft.size());
  const bool adasd = params.speculation.policy == Policy::adasd;
  if (adasd || (params.verification == Verification::block && !params.follows_target_noise())) {
    for (std::int32_t node = 0; node < size; ++node) {
      if (draft.parents()[static_cast<std::size_t>(node)] != node - 1) {
        throw InvalidArgument(expected_got(
            "draft", std::string("a chain for ") + (adasd ? "adasd" : "block verification"),
            "a tree"));
      }
    }
  }
  if (adasd) {
    for (std::int32_t node = DraftTree::kRoot; node < size - 1; ++node) {
      const auto given = static_cast<std::int64_t>(draft.distribution(node).size());
      if (given == 0 || given > vocab_size) {
        throw InvalidArgument(expected_got(
            "draft",
            "the law behind each drafted token for adasd, 1 to " + std::to_string(vocab_size),
            std::to_string(given) + " probabilities"));
      }
    }
  }
  if (params.follows_target_noise()) return;  // no other law of a draft is believed
  if (draft.draw() == Draw::deterministic) return;
  for (std::int32_t node = DraftTree::kRoot; node < size; ++node) {
    const auto given = static_cast<std::int64_t>(draft.distribution(node).size());
    if (draft.has_children(node) && (given == 0 || given > vocab_size)) {
      throw InvalidArgument(expected_got("draft",
                                         "the probabilities that the children of node " +
                                             std::to_string(node) + " were drawn from, at most " +
                                             std::to_string(vocab_size),
                                         std::to_string(given)));
    }
  }
  for (std::int32_t node = 0; node < size; ++node) {
    const auto at = static_cast<std::size_t>(node);
    const std::span<const float> q = draft.distribution(draft.parents()[at]);
    const auto id = static_cast<std::size_t>(draft.tokens()[at]);
    if (id >= q.size() || !(q[id] > 0.0f)) {
      throw InvalidArgument(expected_got("draft", "tokens that their distribution can give",
                                         "token " + std::to_string(draft.tokens()[at])));
    }
  }
}

}  // namespace

void Decoder::Impl::check_plan(const Plan& plan) const {
  std::int64_t rows = 0;
  std::unordered_set<SequenceId> seen;
  for (const PlanItem& item : plan) {
    const auto found = by_id.find(item.id);
    if (found == by_id.end()) {
      throw InvalidArgument(
          expected_got("plan", "ids of running sequences", std::to_string(item.id)));
    }
    if (!seen.insert(item.id).second) {
      throw InvalidArgument(
          expected_got("plan", "each sequence once", std::to_string(item.id) + " twice"));
    }
    if (item.tokens < 0) {
      throw InvalidArgument(
          expected_got("plan", "tokens of at least 0", std::to_string(item.tokens)));
    }
    const Sequence& s = *found->second;
    const std::int64_t asked = std::min<std::int64_t>(item.tokens, runner.max_rows());
    rows += s.prefilling() ? std::min(asked, s.prefill_tokens - s.processed) : 1 + asked;
  }
  if (rows > runner.max_rows()) {
    throw InvalidArgument(
        expected_got("plan", "at most max_rows = " + std::to_string(runner.max_rows()) + " rows",
                     std::to_string(rows)));
  }
}

void Decoder::Impl::propose() {
  for (std::size_t first = 0; first < drafting.size();) {
    // Sequences of one drafter lie together: one call each.
    Drafter* drafter = drafting[first]->drafter.get();
    std::size_t last = first;
    while (last < drafting.size() && drafting[last]->drafter.get() == drafter) ++last;
    requests.clear();
    if (drafts.size() < last - first) drafts.resize(last - first);
    for (std::size_t i = first; i < last; ++i) {
      Sequence& s = *drafting[i];
      // The pass itself yields one token, so depths beyond tokens_left - 1 have no use.
      requests.push_back({s.id, s.tokens, s.planned,
                          std::min({s.planned, s.tokens_left() - 1, runner.max_draft_depth()}),
                          &s.params, s.thresholds.stop_above(), &s.state, &runner});
      drafts[i - first].clear();
    }
    const std::span<DraftTree> out(drafts.data(), last - first);
    std::string failed;
    try {
      drafter->propose(requests, out);
    } catch (const std::exception& caught) {
      failed = caught.what();
    }
    for (std::size_t i = first; i < last; ++i) {
      Sequence& s = *drafting[i];
      std::swap(s.draft, out[i - first]);
      std::string error = failed;
      if (error.empty()) {
        try {
          check_draft(s.draft, s.params, runner.config().vocab_size);
        } catch (const std::exception& caught) {
          error = caught.what();
        }
      }
      if (!error.empty()) {
        s.draft.clear();
        fail(s, "[drafter " + drafter->name() + "] " + error);
        continue;
      }
      const std::int64_t depth = std::min(s.tokens_left() - 1, runner.max_draft_depth());
      s.draft.prune(depth, s.planned);
      if (s.state.constraint() != nullptr && s.draft.draw() == Draw::deterministic) {
        try {
          prune_by_constraint(s);
        } catch (const std::exception& caught) {
          s.draft.clear();
          fail(s, caught.what());
          continue;
        }
      }
      // A draft as deep as the limits allow was perhaps cut by them.
      s.pruned = !s.draft.empty() && depth < s.planned && s.draft.max_depth() == depth;
    }
    first = last;
  }
}

void Decoder::Impl::lay_out(Sequence& s) {
  if (s.prefilling()) {
    const std::int64_t count = std::min(s.planned, s.prefill_tokens - s.processed);
    if (count == 0) {
      s.in_pass = false;
      return;
    }
    runner.add_committed(s.id, std::span(s.tokens).subspan(static_cast<std::size_t>(s.processed),
                                                           static_cast<std::size_t>(count)));
    s.planned = count;
    s.prompt_rows = count;
    s.root_row = runner.rows() - 1;
    // Behind a preemption the last token has been chosen before.
    s.wants_choice = s.processed + count == s.length();
  } else {
    s.root_row = runner.add_committed(s.id, std::span(s.tokens).last(1));
    s.planned = 1;
    s.wants_choice = true;
  }
  s.tree_row = s.draft.empty() ? runner.rows() : runner.add_tree(s.id, s.draft);
  capture(s);
  if (!s.wants_choice) return;
  s.on_device = cuda_walk != nullptr && s.decides_on_device();
  s.walk.start(s.tokens_left());
  if (s.verifies_block()) s.block.start(s.draft);
  if (s.verifies_typical()) s.typical.start(s.draft, s.params);
}

void Decoder::begin_round(const Plan& plan) {
  Impl& d = *impl_;
  const Impl::Busy busy(d, "begin_round");
  if (d.round_open)
    throw InvalidArgument("[begin_round] expected finish_round first, got an open round");
  d.check_plan(plan);
  if (const auto id = d.reserve(plan)) {
    const std::int64_t size = d.runner.cache().layout().block_size;
    throw CapacityError(
        expected_got("kv cache", "blocks for what sequence " + std::to_string(*id) + " may commit",
                     std::to_string(d.runner.cache().available_blocks()) + " blocks of " +
                         std::to_string(size) + " tokens free: preempt a sequence"));
  }
  d.gone.clear();
  d.progress.clear();
  for (const auto& s : d.live) {
    s->in_pass = false;
    s->prompt_rows = 0;
    s->wants_choice = false;
    s->on_device = false;
    s->pruned = false;
    s->trimmed = -1.0;
    s->draft.clear();
    s->logprobs.clear();
    s->captured = false;
    s->feature_rows.clear();
    if (s->tokens_left() == 0) s->finish = Finish::length;  // max_tokens = 0
  }
  const auto start = Clock::now();
  d.drafting.clear();
  for (const PlanItem& item : plan) {
    Sequence& s = *d.by_id.at(item.id);
    if (s.finish != Finish::none) continue;
    s.planned = item.tokens;
    s.in_pass = true;
    if (!s.prefilling() && s.drafter != nullptr && item.tokens > 0 && s.tokens_left() > 1) {
      s.asked = item.tokens;
      d.drafting.push_back(&s);
    }
  }
  std::stable_sort(d.drafting.begin(), d.drafting.end(), [](const Sequence* a, const Sequence* b) {
    return std::less<>()(a->drafter.get(), b->drafter.get());
  });
  d.propose();
  d.draft_seconds = seconds_since(start);
  d.trim();
  d.runner.begin();
  for (const PlanItem& item : plan) {
    Sequence& s = *d.by_id.at(item.id);
    if (s.in_pass && s.finish == Finish::none) d.lay_out(s);
  }
  // A GPU works on it while the caller does something else.
  if (d.cuda_walk != nullptr) d.launch_on_device();
  d.round_open = true;
}

void Decoder::Impl::settle(Sequence& s) {
  if (!s.in_pass || s.finish != Finish::none) return;
  note_features(s);
  runner.advance(s.id, s.planned, s.tokens);
  SequenceCounters& counters = s.counters;
  const bool prefill = s.prefilling();
  if (prefill) {
    s.processed += s.planned;
    counters.prefill_seconds += times.verify_seconds;
  } else {
    counters.draft_seconds += times.draft_seconds;
    counters.verify_seconds += times.verify_seconds;
    counters.sample_seconds += times.sample_seconds;
  }
  if (!s.wants_choice) return;
  const std::vector<TokenId>& emitted = s.walk.emitted();
  path.clear();
  for (const std::int32_t node : s.walk.path()) {
    path.push_back(runner.scratch_of(s.tree_row + node));
  }
  s.tokens.insert(s.tokens.end(), emitted.begin(), emitted.end());
  runner.commit(s.id, path, s.tokens);
  if (prefill) {
    counters.tokens += 1;
    totals.counters.tokens += 1;
    s.first_token = Clock::now();
  } else {
    const bool truncated = was_truncated(s);
    count_round(s, static_cast<std::int64_t>(emitted.size()), truncated, 1, counters);
    count_round(s, static_cast<std::int64_t>(emitted.size()), truncated, 1, totals.counters);
    const bool rejected = s.draft.has_children(s.walk.node());
    s.brake.observe(std::ssize(s.draft.tokens()), s.draft.max_depth(), std::ssize(emitted) - 1,
                    rejected, !truncated);
    if (!truncated) record(s, std::ssize(emitted) - 1, rejected);
    if (s.verifies_adasd()) s.thresholds.settle();
  }
  if (s.walk.end() == WalkEnd::stop) s.finish = Finish::stop;
  if (s.walk.end() == WalkEnd::length) s.finish = Finish::length;
  if (s.drafter != nullptr && s.finish == Finish::none) {
    try {
      s.drafter->observe(s.id, emitted);
    } catch (const std::exception& caught) {
      fail(s, "[drafter " + s.drafter->name() + "] " + caught.what());
    }
  }
}

// Before sequences settle: prefilling or not, they are as the pass had them.
void Decoder::Impl::count_pass() {
  if (times.rows == 0) return;
  totals.passes += 1;
  totals.rows += times.rows;
  SequenceCounters& counters = totals.counters;
  const bool decoding = std::any_of(
      live.begin(), live.end(), [](const auto& s) { return s->in_pass && s->prompt_rows == 0; });
  (decoding ? counters.verify_seconds : counters.prefill_seconds) += times.verify_seconds;
  counters.draft_seconds += times.draft_seconds;
  counters.sample_seconds += times.sample_seconds;
}

// Takes finished sequences out. They stay readable in `gone` until the next round.
void Decoder::Impl::retire() {
  for (auto& s : live) {
    if (s->finish == Finish::none) continue;
    runner.cache().remove(s->id);
    by_id.erase(s->id);
    if (s->drafter != nullptr) {
      // What it throws is its own loss; the sequence is over. It is released whatever it says.
      try {
        if (s->finish != Finish::error) s->drafter->finished(s->id, s->tokens);
      } catch (const std::exception&) {
      }
      try {
        s->drafter->release(s->id);
      } catch (const std::exception&) {
      }
    }
    gone.push_back(std::move(s));
  }
  std::erase(live, nullptr);
}

std::span<const Progress> Decoder::finish_round() {
  Impl& d = *impl_;
  const Impl::Busy busy(d, "finish_round");
  if (!d.round_open)
    throw InvalidArgument("[finish_round] expected begin_round first, got no open round");
  d.round_open = false;
  const cpu::FpMode mode;
  const auto start = d.cuda_walk != nullptr ? d.launched : Clock::now();
  if (d.cuda_walk != nullptr) {
    d.walk_on_device();
  } else {
    d.runner.forward();
  }
  const auto forward_done = Clock::now();
  d.walk_all();
  d.times = {d.runner.rows(), d.draft_seconds,
             std::chrono::duration<double>(forward_done - start).count(),
             seconds_since(forward_done)};
  d.count_pass();
  d.observe_round(d.times.verify_seconds + d.times.sample_seconds);
  for (const auto& s : d.live) d.settle(*s);
  d.hand_over_features();
  for (const auto& s : d.live) {
    if (!s->in_pass && s->finish == Finish::none) continue;
    Progress progress;
    progress.id = s->id;
    if (s->finish != Finish::error && s->wants_choice) {
      progress.tokens = s->walk.emitted();
      progress.logprobs = s->logprobs;
      if (!s->prompt_told && s->params.prompt_logprobs >= 0) {
        progress.prompt_logprobs = s->prompt_logprobs;
        s->prompt_told = true;
      }
    }
    progress.finish = s->finish;
    progress.counters = &s->counters;
    progress.error = s->error;
    d.progress.push_back(std::move(progress));
  }
  d.retire();
  if (d.options.check_invariants) d.runner.cache().check_invariants();
  return d.progress;
}

const DecoderTotals& Decoder::totals() const { return impl_->totals; }
void Decoder::clear_totals() { impl_->totals = {}; }

void Decoder::forget_drafts() {
  impl_->records.clear();
  impl_->recent_seconds = impl_->recent_prompt_seconds = 0;
}

RoundTimes Decoder::last_times() const { return impl_->times; }

std::vector<RoundShare> Decoder::last_round() const {
  const Impl& d = *impl_;
  if (d.round_open) {
    throw InvalidArgument("[last_round] expected finish_round first, got an open round");
  }
  std::vector<RoundShare> shares;
  const auto add = [&](const Sequence& s) {
    if (!s.in_pass) return;
    shares.push_back({s.id, s.prompt_rows, &s.draft, {}, {}});
    if (!s.wants_choice) return;
    shares.back().accepted = s.walk.path();
    shares.back().emitted = s.walk.emitted();
  };
  for (const auto& s : d.live) add(*s);
  for (const auto& s : d.gone) add(*s);
  return shares;
}

std::span<const Progress> Decoder::round(const Plan& plan) {
  begin_round(plan);
  return finish_round();
}

}  // namespace specrt
