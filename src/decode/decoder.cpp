#include "specrt/decoder.h"

#include <algorithm>

#include "decode/decoder_impl.h"
#include "decode/row_cost.h"
#include "decode/runner_options.h"

namespace specrt {
namespace {

void require_cache(const DecoderOptions& options) {
  if (options.kv_cache_bytes <= 0) {
    throw InvalidArgument(
        expected_got("kv_cache_bytes", "at least 1", std::to_string(options.kv_cache_bytes)));
  }
}

// A grammar's state cannot follow tokens that the target has not settled on.
void check_constrained(const SamplingParams& params) {
  if (params.verification == Verification::block || params.verification == Verification::typical) {
    throw UnsupportedError(expected_got("verification", "coupled or rejection with a constraint",
                                        name_of(params.verification)));
  }
  if (params.speculation.synthetic()) {
    throw UnsupportedError(
        "[synthetic_acceptance_rates] expected none with a constraint, got some");
  }
  if (params.speculation.policy == Policy::adasd) {
    throw UnsupportedError("[policy] expected one other than 'adasd' with a constraint, got it");
  }
}

}  // namespace

RunnerOptions runner_options(const DecoderOptions& options, bool with_team) {
  RunnerOptions out = shared_runner_options(options);
  out.features = options.features;
  if (with_team) {
    out.team = options.team != nullptr
                   ? options.team
                   : std::make_shared<ThreadTeam>(options.threads, options.pin_threads);
  }
  return out;
}

std::string resolve_kv_cache_dtype(const std::string& kv_cache_dtype, DType dtype) {
  return name_of(kv_dtype_from_name(kv_cache_dtype, dtype));
}

MemoryUse memory_of(const ModelConfig& config, Precision precision, const DecoderOptions& options) {
  require_cache(options);
  const RunnerOptions runner = runner_options(options, false);
  check_device(config, precision, runner);
  MemoryUse use;
  if (const std::optional<int> device = cuda_device_of(options.device)) {
    use.weights = cuda_layout(config, precision, cuda::architecture_of(*device)).bytes;
  } else {
    use.weights = weight_bytes(config, precision);
  }
  use.kv_cache = Runner::kv_layout(config, activation_dtype(precision), runner).bytes();
  use.workspace = Runner::workspace_bytes(config, runner);
  use.workspace +=
      cuda_device_of(options.device)
          ? CudaWalk::bytes(config.vocab_size, options.max_batch_size, options.max_rows)
          : Chooser::bytes_for(config.vocab_size);
  return use;
}

std::int64_t kv_cache_bytes_for(const ModelConfig& config, Precision precision,
                                const DecoderOptions& options, std::int64_t sequences,
                                std::int64_t tokens) {
  DecoderOptions unsized = options;
  unsized.kv_cache_bytes = 0;
  const RunnerOptions runner = runner_options(unsized, false);
  KvLayout layout = Runner::kv_layout(config, activation_dtype(precision), runner);
  const std::int64_t blocks = (tokens + options.block_size - 1) / options.block_size;
  layout.set_blocks(blocks * sequences, options.max_batch_size,
                    Runner::longest_in_blocks(config, runner));
  return layout.bytes();
}

namespace {

constexpr double kLongestWait = 1e8;  // seconds, which nanoseconds of 64 bits hold

double head_share_of(const ModelConfig& config) {
  const double hidden = static_cast<double>(config.hidden_size);
  const double head = hidden * static_cast<double>(config.vocab_size);
  const auto attention =
      static_cast<double>(config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads));
  const double layer = hidden * (attention + 3.0 * static_cast<double>(config.intermediate_size));
  return head / (head + static_cast<double>(config.num_layers) * layer);
}

}  // namespace

Decoder::Impl::Impl(const Model& model, const DecoderOptions& given)
    : options(given),
      runner(model, runner_options(given, true)),
      chooser(runner.kernels(), model.config().vocab_size),
      weight_bytes(runner.memory().weights),
      row_cost(runner.cuda() != nullptr ? kCudaRowCost
                                        : row_cost_of(cpu_isa_from_name(runner.kernels().name))),
      head_share(head_share_of(model.config())),
      cost(cpu_isa_from_name(runner.kernels().name)) {
  progress.reserve(static_cast<std::size_t>(options.max_batch_size));
  if (runner.cuda() != nullptr) {
    cuda_walk =
        std::make_unique<CudaWalk>(*runner.cuda(), options.max_batch_size, runner.max_rows());
  }
}

Decoder::Decoder(const Model& model, const DecoderOptions& options) {
  if (!model.valid()) throw InvalidArgument("[decoder] expected a loaded model, got an empty one");
  require_cache(options);
  impl_ = std::make_unique<Impl>(model, options);
}

Decoder::~Decoder() {
  for (const auto& sequence : impl_->preempted) impl_->leave(*sequence);
  for (const auto& sequence : impl_->live) {
    if (sequence->drafter == nullptr) continue;
    try {
      sequence->drafter->release(sequence->id);
    } catch (...) {  // a destructor has nobody to tell
    }
  }
}

bool Decoder::can_add(std::int64_t prompt_tokens, std::int64_t max_tokens,
                      std::int64_t reserve) const {
  const Impl& d = *impl_;
  std::int64_t positions = Impl::kv_positions(d.max_length(prompt_tokens, max_tokens));
  if (reserve >= 0 && reserve < positions - prompt_tokens) positions = prompt_tokens + reserve;
  return std::ssize(d.live) < d.options.max_batch_size && d.runner.cache().can_add(positions);
}

void Decoder::check(std::span<const TokenId> prompt, const SamplingParams& params) const {
  const Impl& d = *impl_;
  const std::int64_t vocab = d.runner.config().vocab_size;
  params.check(vocab);
  const auto length = static_cast<std::int64_t>(prompt.size());
  if (length == 0) throw InvalidArgument(expected_got("prompt", "at least one token", "none"));
  const std::int64_t limit = d.runner.max_model_len();
  if (length >= limit) {
    throw InvalidArgument(expected_got("prompt",
                                       "fewer tokens than max_model_len = " + std::to_string(limit),
                                       std::to_string(length)));
  }
  for (const TokenId token : prompt) {
    if (token < 0 || token >= vocab) {
      throw InvalidArgument(expected_got(
          "prompt", "token ids in [0, " + std::to_string(vocab) + ")", std::to_string(token)));
    }
  }
  const std::int64_t max_length = d.max_length(length, params.max_tokens);
  const KvLayout& layout = d.runner.cache().layout();
  const std::int64_t needed = Impl::kv_positions(max_length);
  if (!d.runner.cache().fits(needed)) {
    const std::int64_t capacity = layout.groups[0].num_blocks * layout.block_size;
    throw CapacityError(expected_got(
        "kv_cache_bytes", "room for " + std::to_string(needed) + " tokens of this request",
        std::to_string(capacity) +
            " tokens in all; shorten the prompt or max_tokens, or raise kv_cache_bytes"));
  }
}

std::int64_t Decoder::most_tokens(std::int64_t prompt_tokens) const {
  const Impl& d = *impl_;
  std::int64_t most = 0;
  std::int64_t beyond = std::max<std::int64_t>(0, d.runner.max_model_len() - prompt_tokens) + 1;
  while (beyond - most > 1) {
    const std::int64_t tokens = most + (beyond - most) / 2;
    const bool fits = d.runner.cache().fits(Impl::kv_positions(prompt_tokens + tokens));
    (fits ? most : beyond) = tokens;
  }
  return most;
}

SequenceId Decoder::add(std::span<const TokenId> prompt, const SamplingParams& params,
                        std::shared_ptr<Drafter> drafter,
                        std::shared_ptr<TokenConstraint> constraint, std::int64_t reserve,
                        double waited_seconds) {
  Impl& d = *impl_;
  d.require_idle("add");
  check(prompt, params);
  if (!(waited_seconds >= 0.0 && waited_seconds < kLongestWait)) {
    throw InvalidArgument(expected_got("waited_seconds", "a time of at most some years",
                                       std::to_string(waited_seconds)));
  }
  if (constraint != nullptr) check_constrained(params);
  if (!params.speculation.drafts()) drafter = nullptr;
  if (drafter != nullptr && params.speculation.policy == Policy::adasd && !drafter->tells_laws()) {
    throw UnsupportedError(expected_got(
        "policy", "a drafter that tells its laws over the target's vocabulary with 'adasd'",
        drafter->name()));
  }
  const auto length = static_cast<std::int64_t>(prompt.size());
  const std::int64_t max_length = d.max_length(length, params.max_tokens);
  if (static_cast<int>(d.live.size()) >= d.options.max_batch_size) {
    throw CapacityError(expected_got(
        "max_batch_size",
        "fewer than " + std::to_string(d.options.max_batch_size) + " sequences running",
        std::to_string(d.live.size())));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = d.next_id;
  sequence->params = params;
  sequence->drafter = drafter;
  if (drafter != nullptr) {
    sequence->step_cost = drafter->step_cost(d.weight_bytes);
    sequence->expected = d.record_of(drafter->name())->acceptance.as_guess();
  }
  sequence->arrived =
      std::chrono::steady_clock::now() - std::chrono::duration_cast<std::chrono::nanoseconds>(
                                             std::chrono::duration<double>(waited_seconds));
  sequence->prompt_tokens = length;
  sequence->prefill_tokens = length;
  sequence->max_length = max_length;
  sequence->tokens.reserve(static_cast<std::size_t>(max_length));
  sequence->tokens.assign(prompt.begin(), prompt.end());
  sequence->counters.prompt_tokens = length;
  sequence->state =
      LogitsState(params, prompt, d.runner.config().vocab_size, std::move(constraint));
  d.find_features(*sequence);
  if (d.cuda_walk != nullptr) d.cuda_walk->make_room(d.live, d.preempted, *sequence);
  if (drafter != nullptr) drafter->admit(sequence->id, prompt, max_length);
  try {
    d.enter(*sequence, d.positions_at_first(*sequence, reserve));
  } catch (...) {
    if (drafter != nullptr) drafter->release(sequence->id);
    throw;
  }
  sequence->counters.cached_prompt_tokens = sequence->processed;
  d.totals.counters.prompt_tokens += length;
  d.totals.counters.cached_prompt_tokens += sequence->processed;
  ++d.next_id;
  d.by_id.emplace(sequence->id, sequence.get());
  d.live.push_back(std::move(sequence));
  return d.live.back()->id;
}

SequenceCounters Decoder::cancel(SequenceId id) {
  Impl& d = *impl_;
  d.require_between_rounds("cancel");
  if (const auto at = d.look_up_preempted(id); at != d.preempted.end()) {
    const std::unique_ptr<Sequence> sequence = std::move(*at);
    d.preempted.erase(at);
    d.leave(*sequence);
    return sequence->counters;
  }
  Sequence& s = d.find(id);
  s.finish = Finish::error;
  SequenceCounters counters = s.counters;
  d.retire();
  return counters;
}

SequenceCounters Decoder::stop(SequenceId id, std::int64_t dropped) {
  Impl& d = *impl_;
  d.require_idle("stop");
  // A sequence that the core itself ended in this round may have reached the caller's stop earlier.
  const auto over = std::find_if(d.gone.begin(), d.gone.end(), [id](const auto& s) {
    return s->id == id && (s->finish == Finish::stop || s->finish == Finish::length);
  });
  const bool running = over == d.gone.end();
  Sequence& s = running ? d.find(id) : **over;
  const auto emitted = static_cast<std::int64_t>(s.walk.emitted().size());
  if (d.round_open || !s.wants_choice || dropped < 0 || dropped >= emitted) {
    throw InvalidArgument(expected_got("stop",
                                       "to drop less than the " +
                                           std::to_string(s.wants_choice ? emitted : 0) +
                                           " tokens of the sequence's last round, right after it",
                                       std::to_string(dropped)));
  }
  SequenceCounters counters = s.counters;
  if (counters.rounds > 0) {  // else its only token is prefill's, which belongs to no round
    for (SequenceCounters* one : {&counters, &d.totals.counters}) {
      count_round(s, emitted, was_truncated(s), -1, *one);
      count_round(s, emitted - dropped, true, 1, *one);
    }
  }
  if (running) cancel(id);
  return counters;
}

bool Decoder::idle() const { return impl_->live.empty() && impl_->preempted.empty(); }

std::vector<SequenceState> Decoder::sequences() const {
  std::vector<SequenceState> out;
  for (const auto& s : impl_->live) {
    out.push_back({s->id, s->prefill_tokens - s->processed, s->length(), s->tokens_left(),
                   s->drafter != nullptr, s->params.speculation.num_speculative_tokens,
                   s->params.speculation.policy, s->params.draft_changes_text()});
  }
  return out;
}

std::int64_t Decoder::draft_limit(SequenceId id, std::int64_t most) const {
  Impl& d = *impl_;
  const Sequence& s = d.find(id);
  if (s.drafter == nullptr) return 0;
  return s.brake.limit(most, {d.row_cost, s.step_cost});
}

MemoryUse Decoder::memory() const {
  MemoryUse use = impl_->runner.memory();
  use.workspace += impl_->cuda_walk != nullptr
                       ? impl_->cuda_walk->device_bytes()
                       : Chooser::bytes_for(impl_->runner.config().vocab_size);
  return use;
}

// Layers with a window soon read no more.
std::int64_t Decoder::context_bytes() const {
  std::int64_t bytes = 0;
  for (const KvGroup& group : impl_->runner.cache().layout().groups) {
    if (group.window == 0) bytes += group.bytes_per_slot();
  }
  return bytes;
}

std::int64_t Decoder::max_model_len() const { return impl_->runner.max_model_len(); }

std::int64_t Decoder::max_rows() const { return impl_->runner.max_rows(); }

std::int64_t Decoder::max_batch_size() const { return impl_->options.max_batch_size; }

std::int64_t Decoder::vocab_size() const { return impl_->runner.config().vocab_size; }

std::int64_t Decoder::free_kv_tokens() const {
  const KvCache& cache = impl_->runner.cache();
  return cache.available_blocks() * cache.layout().block_size;
}

CpuIsa Decoder::cpu_isa() const { return cpu_isa_from_name(impl_->runner.kernels().name); }

int Decoder::threads() const { return impl_->runner.threads(); }

void Decoder::check_invariants() const { impl_->runner.cache().check_invariants(); }

}  // namespace specrt
