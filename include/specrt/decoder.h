#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "specrt/constraint.h"
#include "specrt/cpu.h"
#include "specrt/draft_tree.h"
#include "specrt/drafter.h"
#include "specrt/export.h"
#include "specrt/features.h"
#include "specrt/memory.h"
#include "specrt/model.h"
#include "specrt/planner.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

struct SPECRT_API DecoderOptions {
  std::int64_t kv_cache_bytes = 0;  ///< pool and scratch slots; at least one block must fit. More
                                    ///< than all sequences at full length take serves prefix
                                    ///< caching, and is not taken without
  std::int64_t max_model_len = 0;   ///< 0: the model's own; prompt and output together
  int max_batch_size = 32;          ///< sequences at once
  int max_rows = 512;               ///< tokens in one forward pass, prefill and drafts together
  int block_size = 16;              ///< tokens in a block of the KV cache
  /// "auto" (a float32 or float16 model's own, else bfloat16), "float32", "bfloat16", "float16"
  /// (CUDA only) or "int8": how keys and values are kept. int8 has a scale for each token and head.
  /// Another dtype is another result.
  std::string kv_cache_dtype = "auto";
  int threads = 0;                   ///< 0: the cores this process may use
  bool pin_threads = false;          ///< ties threads to processors; see ThreadTeam
  std::shared_ptr<ThreadTeam> team;  ///< null: one of its own, of `threads` and `pin_threads`
  std::string cpu_isa = "auto";
  /// "cpu", or "cuda" or "cuda:N": an NVIDIA GPU, which takes bfloat16, float16, int8 and int4
  /// weights, and KV caches in float16 for float16 models, else in bfloat16. Another device is
  /// another result, within the precision's tolerance. Memory is then the GPU's.
  std::string device = "cpu";
  bool enable_prefix_caching = true;  ///< later prompts share blocks with the same beginning
  TargetFeatures features;            ///< what drafters may read: all that any of them does
  bool check_invariants = false;      ///< for tests: check the KV bookkeeping after every round,
                                      ///< and keep KV memory that holds nothing NaN
};

/// What `kv_cache_dtype` comes to for a model of that precision: "float32", "bfloat16", "float16"
/// or "int8".
/// Throws InvalidArgument for any other name.
SPECRT_API std::string resolve_kv_cache_dtype(const std::string& kv_cache_dtype, DType dtype);

/// What a Decoder of these options takes, before anything is allocated. Throws as the
/// constructor would.
SPECRT_API MemoryUse memory_of(const ModelConfig& config, Precision precision,
                               const DecoderOptions& options);

/// Bytes of KV cache for `sequences` sequences of `tokens` tokens each, scratch slots included.
/// What goes beyond max_batch_size sequences of max_model_len counts with prefix caching only.
SPECRT_API std::int64_t kv_cache_bytes_for(const ModelConfig& config, Precision precision,
                                           const DecoderOptions& options, std::int64_t sequences,
                                           std::int64_t tokens);

enum class Finish : std::uint8_t {
  none = 0,  ///< still running
  stop,      ///< a stop token; it is the last token
  length,    ///< max_tokens or max_model_len
  error,     ///< see Progress::error
};

struct TokenLogprobs {
  float logprob = 0.0f;   ///< of the token itself: raw log-softmax of the target's logits
  std::int64_t rank = 0;  ///< 1 for the most likely
  std::vector<std::pair<TokenId, float>> top;  ///< most likely first
};

/// What one drafter's nodes came to: of all rounds, truncated ones included. A node that several
/// proposed counts for each.
struct SourceCounters {
  std::string source;
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
};

/// Counters of one sequence. "Position" d is depth d of the draft, at index d - 1. Truncated
/// rounds (cut by a limit or a stop) are in the totals and left out of the *_at vectors and of
/// full_*.
struct SequenceCounters {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_prompt_tokens = 0;  ///< of these, found in the prefix cache
  std::int64_t tokens = 0;                ///< generated; = 1 + accepted + rounds once prefilled
  std::int64_t rounds = 0;
  std::int64_t drafts = 0;  ///< rounds that had a draft
  std::int64_t drafted = 0;
  std::int64_t accepted = 0;
  std::int64_t truncated_rounds = 0;
  std::int64_t full_rounds = 0;  ///< rounds - truncated_rounds
  std::int64_t full_accepted = 0;
  std::int64_t first_rejections =
      0;  ///< full rounds that ended at a node whose children all failed
  std::vector<std::int64_t> drafted_at;  ///< full rounds whose draft reached this depth
  std::vector<std::int64_t> accepted_at;
  std::vector<std::int64_t> first_rejected_at;
  std::int64_t preemptions = 0;
  std::vector<SourceCounters> sources;  ///< by who drafted, in order of appearance
  double draft_seconds = 0;  ///< wall time of the rounds it took part in, not divided by the batch
  double verify_seconds = 0;
  double sample_seconds = 0;
  double prefill_seconds = 0;
};

/// What a round did to one sequence. The spans are valid until the next begin_round().
struct Progress {
  SequenceId id = 0;
  std::span<const TokenId> tokens;          ///< newly committed; empty while prefilling
  std::span<const TokenLogprobs> logprobs;  ///< one a token where asked for
  /// Once, with the first token, where asked for: one entry a prompt token but the first.
  std::span<const TokenLogprobs> prompt_logprobs;
  Finish finish = Finish::none;
  const SequenceCounters* counters = nullptr;
  std::string error;  ///< with Finish::error
};

/// One sequence's share of the last round. Pointers and spans are valid until the next
/// begin_round().
struct RoundShare {
  SequenceId id = 0;
  std::int64_t prompt_tokens = 0;    ///< of the prompt, processed in it; 0 where it was decoding
  const DraftTree* draft = nullptr;  ///< as it was verified: pruned to what limits allow
  std::span<const std::int32_t> accepted;  ///< its nodes that became tokens, root first
  std::span<const TokenId> emitted;        ///< all tokens that the round committed
};

/// What a decoder has done since it was made, or since clear_totals().
struct DecoderTotals {
  std::int64_t passes = 0;
  std::int64_t rows = 0;  ///< of these passes
  /// All sequences together, also those that still run. Each round's seconds count once: as
  /// prefill where no sequence of it was decoding.
  SequenceCounters counters;
};

/// What the last round cost.
struct RoundTimes {
  std::int64_t rows = 0;  ///< of its pass: prompt tokens, last tokens and draft nodes
  double draft_seconds = 0;
  double verify_seconds = 0;
  double sample_seconds = 0;
};

/// One sequence's share of a round: prompt tokens to process while it is prefilling, draft nodes
/// at most afterwards.
struct PlanItem {
  SequenceId id = 0;
  std::int64_t tokens = 0;
};
using Plan = std::vector<PlanItem>;

struct SequenceState {
  SequenceId id = 0;
  std::int64_t prompt_left = 0;              ///< tokens to process before it decodes (on)
  std::int64_t length = 0;                   ///< prompt and generated tokens
  std::int64_t tokens_left = 0;              ///< until max_tokens or max_model_len
  bool has_drafter = false;                  ///< and a policy under which it drafts
  std::int64_t num_speculative_tokens = -1;  ///< its Speculation's
  Policy policy = Policy::brake;
  bool draft_changes_text = false;  ///< SamplingParams::draft_changes_text()
};

/// Runs rounds of draft, verify and commit for a batch of sequences over one target model.
/// Not thread-safe: one call at a time.
class SPECRT_API Decoder {
 public:
  Decoder(const Model& model, const DecoderOptions& options);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// Takes a sequence in and sets aside KV blocks: for its prompt and `reserve` further tokens, or,
  /// below 0, for the longest output, with which it never lacks one. Throws InvalidArgument for a
  /// bad prompt or parameter and CapacityError where it can never fit; can_add() tells whether
  /// there is room now. `waited_seconds` since it arrived count towards target_ttft_seconds.
  SequenceId add(std::span<const TokenId> prompt, const SamplingParams& params,
                 std::shared_ptr<Drafter> drafter = nullptr,
                 std::shared_ptr<TokenConstraint> constraint = nullptr, std::int64_t reserve = -1,
                 double waited_seconds = 0.0);
  bool can_add(std::int64_t prompt_tokens, std::int64_t max_tokens,
               std::int64_t reserve = -1) const;
  /// Throws what add() would throw however empty the decoder is.
  void check(std::span<const TokenId> prompt, const SamplingParams& params) const;
  /// The largest max_tokens that check() lets pass beside a prompt of so many tokens, as far as it
  /// makes a difference: what context and KV cache have room for. 0 where there is none.
  std::int64_t most_tokens(std::int64_t prompt_tokens) const;

  /// Ends a sequence early, also a preempted one, and frees what it holds. Returns its counters.
  /// Throws InvalidArgument for an unknown id.
  SequenceCounters cancel(SequenceId id);

  /// Sets KV blocks aside for all that a round of this plan can commit. Returns the first sequence
  /// that there are none for; those before it keep theirs. begin_round() does the same, and throws
  /// CapacityError instead. Never the only one running, whose longest output fits.
  std::optional<SequenceId> reserve(const Plan& plan);
  /// Takes a sequence out of the batch and frees its blocks; resume() puts it back, and its tokens
  /// are processed again. Its output is the same as if nothing had happened. A drafter that throws
  /// ends it.
  void preempt(SequenceId id);
  /// `reserve` as in add().
  bool can_resume(SequenceId id, std::int64_t reserve = -1) const;
  void resume(SequenceId id, std::int64_t reserve = -1);

  /// Ends a sequence in its last round, as if the last `dropped` tokens of that round had not
  /// been chosen: for stop conditions that only the caller can see. It may have finished in that
  /// round by itself. Returns its counters, that round counted as truncated. At least one token of
  /// the round must remain.
  SequenceCounters stop(SequenceId id, std::int64_t dropped);

  bool idle() const;
  std::vector<SequenceState> sequences() const;

  /// How many of `most` draft nodes are worth asking for, going by what became of this sequence's
  /// drafts so far and by what drafts cost; fewer and in the end none where they fail, with a probe
  /// now and then. Depends on that sequence alone.
  std::int64_t draft_limit(SequenceId id, std::int64_t most) const;

  /// How many of `rows` rows prompts may take in the next round for sequences with a
  /// target_tpot_seconds to keep it. All of them where nobody has one, and where one has waited for
  /// half of its own target_ttft_seconds or was preempted behind its first token; where a prompt
  /// has waited for a second, as many as take half of the time.
  std::int64_t prompt_limit(std::int64_t rows) const;

  /// How many draft nodes each sequence with policy `goodput` should get of `most` (by sequences(),
  /// 0 for all others), given what the others draft and rows of prompts. Whatever it says,
  /// `coupled` text is the same.
  std::vector<std::int64_t> allocate(std::span<const std::int64_t> most,
                                     std::span<const std::int64_t> others,
                                     std::int64_t prompt_rows) const;

  /// How many steps policy `ema_tiers` would have sequences draft now.
  std::int64_t ema_steps() const;

  /// What rounds cost, as far as is known; it follows what they take.
  const CostModel& cost_model() const;
  void set_cost_model(CostModel model);
  void set_draft_cost(const std::string& drafter, const CostModel::Draft& cost);

  /// Drafts for the plan's sequences and lays out the pass.
  void begin_round(const Plan& plan);
  /// Runs the pass, verifies, commits. Finished sequences are gone afterwards.
  std::span<const Progress> finish_round();
  std::span<const Progress> round(const Plan& plan);
  const DecoderTotals& totals() const;
  void clear_totals();
  /// Forgets how drafts have fared so far, by which policies expect what becomes of new sequences'.
  void forget_drafts();
  /// Of the last finished round; zeros before the first.
  RoundTimes last_times() const;
  /// The sequences that took part in it, also those that it ended, with their drafts: for traces.
  /// Put together when asked, so a round of which nobody asks costs nothing. Throws
  /// InvalidArgument while a round is open.
  std::vector<RoundShare> last_round() const;

  MemoryUse memory() const;            ///< of target, pool and workspace; drafters tell their own
  std::int64_t context_bytes() const;  ///< of the KV cache that a token of context has to be read
  std::int64_t max_model_len() const;
  std::int64_t max_rows() const;
  std::int64_t max_batch_size() const;
  std::int64_t vocab_size() const;
  std::int64_t free_kv_tokens() const;
  CpuIsa cpu_isa() const;
  int threads() const;

  /// Throws InternalError where the KV bookkeeping contradicts itself.
  void check_invariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Every sequence's draft nodes by its own Speculation; prefill takes what rows are left.
/// `num_speculative_tokens` is for those that say nothing of it. Where a pass is full, the rows are
/// shared out evenly, and prefill has a quarter of them.
SPECRT_API Plan plan_policies(const Decoder& decoder, std::int64_t num_speculative_tokens);
/// As if every sequence that drafts had policy `goodput`: the one choice over the batch that yields
/// the most tokens a second by Decoder::cost_model(), under each sequence's targets.
SPECRT_API Plan plan_goodput(const Decoder& decoder, std::int64_t num_speculative_tokens);
/// As if every sequence that drafts had policy `fixed`.
SPECRT_API Plan plan_fixed(const Decoder& decoder, std::int64_t num_speculative_tokens);
/// As if every sequence that drafts had policy `brake`: each gets its Decoder::draft_limit().
SPECRT_API Plan plan_braked(const Decoder& decoder, std::int64_t num_speculative_tokens);

/// Measures what passes, and drafts of `drafter` (null: none), cost on this machine, with sequences
/// of its own: `decoder` has to be idle and is so again afterwards. Takes `seconds` or `passes`
/// passes, whichever is longer, and less where no more is to be learnt.
SPECRT_API CostModel measure_cost(Decoder& decoder, std::shared_ptr<Drafter> drafter,
                                  std::int64_t num_speculative_tokens, double seconds = 2.0,
                                  int passes = 20);

}  // namespace specrt
