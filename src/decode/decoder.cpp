#include "specrt/decoder.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <unordered_set>

#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/sequence.h"
#include "model/runner.h"
#include "specrt/error.h"

namespace specrt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

RunnerOptions runner_options(const DecoderOptions& options, bool with_team) {
  RunnerOptions out;
  out.kv_cache_bytes = options.kv_cache_bytes;
  out.max_model_len = options.max_model_len;
  out.max_batch_size = options.max_batch_size;
  out.max_rows = options.max_rows;
  out.block_size = options.block_size;
  out.cpu_isa = options.cpu_isa;
  if (with_team) {
    out.team = options.team != nullptr ? options.team : std::make_shared<ThreadTeam>(options.threads);
  }
  return out;
}

std::int64_t chooser_bytes(const ModelConfig& config) { return config.vocab_size * 12; }

void require_cache(const DecoderOptions& options) {
  if (options.kv_cache_bytes <= 0) {
    throw InvalidArgument(
        expected_got("kv_cache_bytes", "at least 1", std::to_string(options.kv_cache_bytes)));
  }
}

}  // namespace

MemoryUse memory_of(const ModelConfig& config, DType dtype, const DecoderOptions& options) {
  require_cache(options);
  const RunnerOptions runner = runner_options(options, false);
  MemoryUse use;
  use.weights = weight_bytes(config, dtype);
  use.kv_cache = Runner::kv_layout(config, dtype, runner).bytes();
  use.workspace = Runner::workspace_bytes(config, runner) + chooser_bytes(config);
  return use;
}

std::int64_t kv_cache_bytes_for(const ModelConfig& config, DType dtype,
                                const DecoderOptions& options, std::int64_t sequences,
                                std::int64_t tokens) {
  DecoderOptions unsized = options;
  unsized.kv_cache_bytes = 0;
  const KvLayout layout = Runner::kv_layout(config, dtype, runner_options(unsized, false));
  const std::int64_t blocks = (tokens + options.block_size - 1) / options.block_size;
  return layout.scratch_bytes() + blocks * sequences * layout.bytes_per_block();
}

struct Decoder::Impl {
  Impl(const Model& model, const DecoderOptions& given)
      : options(given),
        runner(model, runner_options(given, true)),
        chooser(runner.kernels(), model.config().vocab_size) {
    progress.reserve(static_cast<std::size_t>(options.max_batch_size));
  }

  DecoderOptions options;
  Runner runner;
  Chooser chooser;
  std::vector<std::unique_ptr<Sequence>> live;                 // in order of arrival
  std::vector<std::unique_ptr<Sequence>> gone;                 // finished in the last round
  std::unordered_map<SequenceId, Sequence*> by_id;
  SequenceId next_id = 0;
  bool round_open = false;
  double draft_seconds = 0;
  std::vector<Progress> progress;
  // Scratch of a round.
  std::vector<Sequence*> drafting;
  std::vector<DraftRequest> requests;
  std::vector<DraftTree> drafts;
  std::vector<std::int64_t> logit_rows;
  std::vector<std::int32_t> path;

  Sequence& find(SequenceId id) {
    const auto found = by_id.find(id);
    if (found == by_id.end()) {
      throw InvalidArgument(expected_got("sequence", "the id of a running sequence", std::to_string(id)));
    }
    return *found->second;
  }

  std::int64_t max_length(std::int64_t prompt, std::int64_t max_tokens) const {
    const std::int64_t room = runner.max_model_len() - prompt;
    return prompt + std::min(max_tokens, std::max<std::int64_t>(room, 0));
  }
  // The last token's K/V are never needed.
  static std::int64_t kv_positions(std::int64_t max_length) {
    return std::max<std::int64_t>(1, max_length - 1);
  }

  void check_plan(const Plan& plan) const;
  void propose();
  void fail(Sequence& sequence, const std::string& what) {
    sequence.finish = Finish::error;
    sequence.error = what;
    sequence.wants_choice = false;
  }
  void lay_out(Sequence& sequence);
  void choose(Sequence& sequence, std::span<const float> logits);
  void walk_all();
  void settle(Sequence& sequence, double seconds, double sample_seconds);
  void retire();
};

Decoder::Decoder(const Model& model, const DecoderOptions& options) {
  if (!model.valid()) throw InvalidArgument("[decoder] expected a loaded model, got an empty one");
  require_cache(options);
  impl_ = std::make_unique<Impl>(model, options);
}

Decoder::~Decoder() {
  for (const auto& sequence : impl_->live) {
    if (sequence->drafter == nullptr) continue;
    try {
      sequence->drafter->release(sequence->id);
    } catch (...) {  // a destructor has nobody to tell
    }
  }
}

bool Decoder::can_add(std::int64_t prompt_tokens, std::int64_t max_tokens) const {
  const Impl& d = *impl_;
  return static_cast<int>(d.live.size()) < d.options.max_batch_size &&
         d.runner.cache().can_add(Impl::kv_positions(d.max_length(prompt_tokens, max_tokens)));
}

void Decoder::check(std::span<const TokenId> prompt, const SamplingParams& params) const {
  const Impl& d = *impl_;
  const std::int64_t vocab = d.runner.config().vocab_size;
  params.check(vocab);
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (length == 0) throw InvalidArgument(expected_got("prompt", "at least one token", "none"));
  const std::int64_t limit = d.runner.max_model_len();
  if (length >= limit) {
    throw InvalidArgument(expected_got(
        "prompt", "fewer tokens than max_model_len = " + std::to_string(limit),
        std::to_string(length)));
  }
  for (const TokenId token : prompt) {
    if (token < 0 || token >= vocab) {
      throw InvalidArgument(expected_got("prompt", "token ids in [0, " + std::to_string(vocab) + ")",
                                         std::to_string(token)));
    }
  }
  const std::int64_t max_length = d.max_length(length, params.max_tokens);
  const KvLayout& layout = d.runner.cache().layout();
  const std::int64_t needed = Impl::kv_positions(max_length);
  const std::int64_t capacity = layout.groups[0].num_blocks * layout.block_size;
  if (needed > capacity) {
    throw CapacityError(expected_got(
        "kv_cache_bytes", "room for " + std::to_string(needed) + " tokens of this request",
        std::to_string(capacity) + " tokens in all; shorten the prompt or max_tokens, or raise kv_cache_bytes"));
  }
}

SequenceId Decoder::add(std::span<const TokenId> prompt, const SamplingParams& params,
                        std::shared_ptr<Drafter> drafter) {
  Impl& d = *impl_;
  check(prompt, params);
  const auto length = static_cast<std::int64_t>(prompt.size());
  const std::int64_t max_length = d.max_length(length, params.max_tokens);
  const std::int64_t needed = Impl::kv_positions(max_length);
  if (static_cast<int>(d.live.size()) >= d.options.max_batch_size) {
    throw CapacityError(expected_got(
        "max_batch_size", "fewer than " + std::to_string(d.options.max_batch_size) + " sequences running",
        std::to_string(d.live.size())));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = d.next_id;
  sequence->params = params;
  sequence->drafter = drafter;
  sequence->prompt_tokens = length;
  sequence->max_length = max_length;
  sequence->tokens.reserve(static_cast<std::size_t>(max_length));
  sequence->tokens.assign(prompt.begin(), prompt.end());
  sequence->counters.prompt_tokens = length;
  d.runner.cache().add(sequence->id, needed);
  if (drafter != nullptr) {
    try {
      drafter->admit(sequence->id, prompt, max_length);
    } catch (...) {
      d.runner.cache().remove(sequence->id);
      throw;
    }
  }
  ++d.next_id;
  d.by_id.emplace(sequence->id, sequence.get());
  d.live.push_back(std::move(sequence));
  return d.live.back()->id;
}

void Decoder::cancel(SequenceId id) {
  Impl& d = *impl_;
  d.find(id);
  if (d.round_open) {
    throw InvalidArgument("[cancel] expected no round between begin_round and finish_round, got an open one");
  }
  for (auto& sequence : d.live) {
    if (sequence->id == id) sequence->finish = Finish::error;
  }
  d.retire();
}

SequenceCounters Decoder::stop(SequenceId id, std::int64_t dropped) {
  Impl& d = *impl_;
  // A sequence that the core itself ended in this round may have reached the caller's stop earlier.
  const auto over = std::find_if(d.gone.begin(), d.gone.end(), [id](const auto& s) {
    return s->id == id && (s->finish == Finish::stop || s->finish == Finish::length);
  });
  const bool running = over == d.gone.end();
  Sequence& s = running ? d.find(id) : **over;
  const auto emitted = static_cast<std::int64_t>(s.walk.emitted().size());
  if (d.round_open || !s.wants_choice || dropped < 0 || dropped >= emitted) {
    throw InvalidArgument(expected_got(
        "stop", "to drop less than the " + std::to_string(s.wants_choice ? emitted : 0) +
                    " tokens of the sequence's last round, right after it",
        std::to_string(dropped)));
  }
  SequenceCounters counters = s.counters;
  if (counters.rounds > 0) {  // else its only token is prefill's, which belongs to no round
    count_round(s, emitted, was_truncated(s), -1, counters);
    count_round(s, emitted - dropped, true, 1, counters);
  }
  if (running) cancel(id);
  return counters;
}

bool Decoder::idle() const { return impl_->live.empty(); }

std::vector<SequenceState> Decoder::sequences() const {
  std::vector<SequenceState> out;
  for (const auto& s : impl_->live) {
    out.push_back({s->id, s->prompt_tokens - s->processed, s->length(), s->tokens_left(),
                   s->drafter != nullptr});
  }
  return out;
}

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
      throw InvalidArgument(expected_got("plan", "each sequence once", std::to_string(item.id) + " twice"));
    }
    if (item.tokens < 0) {
      throw InvalidArgument(expected_got("plan", "tokens of at least 0", std::to_string(item.tokens)));
    }
    const Sequence& s = *found->second;
    rows += s.prefilling() ? std::min(item.tokens, s.prompt_tokens - s.processed) : 1 + item.tokens;
  }
  if (rows > runner.max_rows()) {
    throw InvalidArgument(expected_got("plan", "at most max_rows = " + std::to_string(runner.max_rows()) + " rows",
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
      const Sequence& s = *drafting[i];
      // The pass itself yields one token, so depths beyond tokens_left - 1 have no use.
      requests.push_back({s.id, s.tokens, s.planned, std::min(s.planned, s.tokens_left() - 1), &s.params});
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
          s.draft.check_vocabulary(runner.config().vocab_size);
        } catch (const std::exception& caught) {
          error = caught.what();
        }
      }
      if (!error.empty()) {
        s.draft.clear();
        fail(s, "[drafter " + drafter->name() + "] " + error);
        continue;
      }
      const std::int64_t depth = s.tokens_left() - 1;
      s.draft.prune(depth, s.planned);
      // A draft as deep as the limits allow was perhaps cut by them.
      s.pruned = !s.draft.empty() && depth < s.planned && s.draft.max_depth() == depth;
    }
    first = last;
  }
}

void Decoder::Impl::lay_out(Sequence& s) {
  if (s.prefilling()) {
    const std::int64_t count = std::min(s.planned, s.prompt_tokens - s.processed);
    if (count == 0) {
      s.in_pass = false;
      return;
    }
    runner.add_committed(s.id, std::span(s.tokens).subspan(static_cast<std::size_t>(s.processed),
                                                           static_cast<std::size_t>(count)));
    s.planned = count;
    s.root_row = runner.rows() - 1;
    s.wants_choice = s.processed + count == s.prompt_tokens;
  } else {
    s.root_row = runner.add_committed(s.id, std::span(s.tokens).last(1));
    s.planned = 1;
    s.wants_choice = true;
  }
  s.tree_row = s.draft.empty() ? runner.rows() : runner.add_tree(s.id, s.draft);
  if (s.wants_choice) s.walk.start(s.draft, s.tokens_left());
}

void Decoder::begin_round(const Plan& plan) {
  Impl& d = *impl_;
  if (d.round_open) throw InvalidArgument("[begin_round] expected finish_round first, got an open round");
  d.check_plan(plan);
  d.gone.clear();
  d.progress.clear();
  for (const auto& s : d.live) {
    s->in_pass = false;
    s->wants_choice = false;
    s->pruned = false;
    s->draft.clear();
    s->logprobs.clear();
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
      d.drafting.push_back(&s);
    }
  }
  std::stable_sort(d.drafting.begin(), d.drafting.end(), [](const Sequence* a, const Sequence* b) {
    return std::less<>()(a->drafter.get(), b->drafter.get());
  });
  d.propose();
  d.draft_seconds = seconds_since(start);
  d.runner.begin();
  for (const PlanItem& item : plan) {
    Sequence& s = *d.by_id.at(item.id);
    if (s.in_pass && s.finish == Finish::none) d.lay_out(s);
  }
  d.round_open = true;
}

void Decoder::Impl::choose(Sequence& s, std::span<const float> logits) {
  const std::int64_t position =
      s.length() + static_cast<std::int64_t>(s.walk.emitted().size());
  try {
    const TokenId choice = chooser.choose(logits, s.params, position);
    if (s.params.logprobs >= 0) {
      s.logprobs.emplace_back();
      chooser.logprobs(logits, choice, s.params.logprobs, s.logprobs.back());
    }
    s.walk.step(choice, s.is_stop(choice));
  } catch (const NumericError& error) {
    fail(s, std::string(error.what()) + " at position " + std::to_string(position) +
                " of sequence " + std::to_string(s.id));
  }
}

// Walks every tree with logits held for kLogitRows rows at a time. A child's row lies behind its
// parent's, so one pass over the rows in order serves every walk, and rows behind the last one
// that any walk still waits for are never computed.
void Decoder::Impl::walk_all() {
  logit_rows.clear();
  for (const auto& s : live) {
    if (!s->wants_choice) continue;
    logit_rows.push_back(s->root_row);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(s->draft.size()); ++i) {
      logit_rows.push_back(s->tree_row + i);
    }
  }
  std::sort(logit_rows.begin(), logit_rows.end());
  const auto vocab = static_cast<std::size_t>(runner.config().vocab_size);
  const auto row_of = [](const Sequence& s) {
    return s.walk.node() == DraftTree::kRoot ? s.root_row : s.tree_row + s.walk.node();
  };
  for (std::size_t first = 0; first < logit_rows.size();) {
    const std::size_t last =
        std::min(logit_rows.size(), first + static_cast<std::size_t>(Runner::kLogitRows));
    const auto slice = std::span(logit_rows).subspan(first, last - first);
    const auto waits_here = [&](const Sequence& s) {
      return s.wants_choice && s.walk.running() && row_of(s) >= slice.front() &&
             row_of(s) <= slice.back();
    };
    if (std::any_of(live.begin(), live.end(), [&](const auto& s) { return waits_here(*s); })) {
      const std::span<const float> logits = runner.logits(slice);
      for (const auto& s : live) {
        while (waits_here(*s)) {
          const auto at = std::lower_bound(slice.begin(), slice.end(), row_of(*s)) - slice.begin();
          choose(*s, logits.subspan(static_cast<std::size_t>(at) * vocab, vocab));
        }
      }
    }
    first = last;
  }
}

void Decoder::Impl::settle(Sequence& s, double seconds, double sample_seconds) {
  if (!s.in_pass || s.finish != Finish::none) return;
  runner.advance(s.id, s.planned);
  SequenceCounters& counters = s.counters;
  const bool prefill = s.prefilling();
  if (prefill) {
    s.processed += s.planned;
    counters.prefill_seconds += seconds;
  } else {
    counters.draft_seconds += draft_seconds;
    counters.verify_seconds += seconds;
    counters.sample_seconds += sample_seconds;
  }
  if (!s.wants_choice) return;
  const std::vector<TokenId>& emitted = s.walk.emitted();
  path.clear();
  for (const std::int32_t node : s.walk.path()) {
    path.push_back(runner.scratch_of(s.tree_row + node));
  }
  runner.commit(s.id, path);
  s.tokens.insert(s.tokens.end(), emitted.begin(), emitted.end());
  if (prefill) {
    counters.tokens += 1;
  } else {
    count_round(s, static_cast<std::int64_t>(emitted.size()), was_truncated(s), 1, counters);
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

// Takes finished sequences out. They stay readable in `gone` until the next round.
void Decoder::Impl::retire() {
  for (auto& s : live) {
    if (s->finish == Finish::none) continue;
    runner.cache().remove(s->id);
    by_id.erase(s->id);
    if (s->drafter != nullptr) {
      try {
        s->drafter->release(s->id);
      } catch (const std::exception&) {  // its own loss; the sequence is over
      }
    }
    gone.push_back(std::move(s));
  }
  std::erase(live, nullptr);
}

std::span<const Progress> Decoder::finish_round() {
  Impl& d = *impl_;
  if (!d.round_open) throw InvalidArgument("[finish_round] expected begin_round first, got no open round");
  d.round_open = false;
  const cpu::FpMode mode;
  const auto start = Clock::now();
  d.runner.forward();
  const auto forward_done = Clock::now();
  d.walk_all();
  const double verify = std::chrono::duration<double>(forward_done - start).count();
  const double sample = seconds_since(forward_done);
  for (const auto& s : d.live) d.settle(*s, verify, sample);
  for (const auto& s : d.live) {
    if (!s->in_pass && s->finish == Finish::none) continue;
    Progress progress;
    progress.id = s->id;
    if (s->finish != Finish::error && s->wants_choice) {
      progress.tokens = s->walk.emitted();
      progress.logprobs = s->logprobs;
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

std::span<const Progress> Decoder::round(const Plan& plan) {
  begin_round(plan);
  return finish_round();
}

MemoryUse Decoder::memory() const {
  MemoryUse use = impl_->runner.memory();
  use.workspace += impl_->chooser.bytes();
  return use;
}

std::int64_t Decoder::max_model_len() const { return impl_->runner.max_model_len(); }

std::int64_t Decoder::max_rows() const { return impl_->runner.max_rows(); }

std::int64_t Decoder::free_kv_tokens() const {
  const KvCache& cache = impl_->runner.cache();
  return cache.available_blocks() * cache.layout().block_size;
}

CpuIsa Decoder::cpu_isa() const { return cpu_isa_from_name(impl_->runner.kernels().name); }

int Decoder::threads() const { return impl_->runner.threads(); }

void Decoder::check_invariants() const { impl_->runner.cache().check_invariants(); }

}  // namespace specrt
