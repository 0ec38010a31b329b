#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/cpu.h"
#include "specrt/draft_tree.h"
#include "specrt/export.h"
#include "specrt/features.h"
#include "specrt/memory.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

class LogitsState;
class Model;
class Runner;
struct ModelConfig;

/// What a drafter is asked for, one sequence.
struct DraftRequest {
  SequenceId id = 0;
  std::span<const TokenId> tokens;  ///< prompt and everything committed so far
  std::int64_t max_nodes = 0;       ///< >= 0; 0 asks for nothing
  std::int64_t max_depth = 0;       ///< deeper nodes could never be used
  const SamplingParams* sampling = nullptr;
  /// Policy `adasd`: a token whose own law has more entropy, in nats, is the last of the draft.
  double stop_entropy = std::numeric_limits<double>::infinity();
  LogitsState* logits = nullptr;  ///< the sequence's penalties and masks; for built-in drafters
  Runner* target = nullptr;       ///< the decoder's own, between two passes; for built-in drafters
};

/// Proposes continuations. The target decides what becomes of them, so a drafter can cost time
/// but never change the output; with `rejection` and `block`, never its law, as long as a sampled
/// draft tells the distributions that it came from. (`typical` verification is lossy: there it has
/// a say.) Called from one thread at a time.
class SPECRT_API Drafter {
 public:
  Drafter() = default;
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  virtual ~Drafter();

  virtual const std::string& name() const = 0;

  /// A sequence starts, or one that suspend() kept nothing of starts again, with its output so far.
  /// `max_length` bounds its tokens, prompt included.
  virtual void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) = 0;

  /// Fills out[i] for requests[i]; an empty tree is a fine answer.
  virtual void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) = 0;

  /// Tokens that the target chose and committed, but for those of a sequence's last round.
  virtual void observe(SequenceId id, std::span<const TokenId> committed) = 0;

  /// The target's hidden states that it reads; a decoder is made with room for them
  /// (DecoderOptions::features). Does not change.
  virtual const TargetFeatures& features() const;
  /// Whether this sequence's are still of use: where not, nothing is captured for it.
  virtual bool wants_features(SequenceId) const { return true; }
  /// The first so many positions of an admitted sequence may come without features, out of the
  /// target's prefix cache: what the drafter has of them already. Those that read features of
  /// every position and do not say so get all of them, and the target computes the whole prompt.
  virtual std::int64_t known_positions(SequenceId id) const;
  /// Features of processed tokens, one entry a sequence, after observe(): of prompts chunk by
  /// chunk, then of what each round committed, without gaps, those of an ending sequence too.
  virtual void observe_features(std::span<const ObservedFeatures> batch);

  /// Whether it tells its laws where policy `adasd` asks: over the target's vocabulary, at the
  /// request's temperature (1 where it is greedy), in DraftTree::distribution.
  virtual bool tells_laws() const { return false; }

  /// A sequence has come to its end; `tokens` are prompt and output. Nothing, unless overridden.
  virtual void finished(SequenceId id, std::span<const TokenId> tokens);

  /// The sequence gives up its place for a while: whatever of a pool it holds is freed. True where
  /// something is kept, for resume() or release(); else it is as if released, as it is unless
  /// overridden, and admitted anew with all of its tokens.
  virtual bool suspend(SequenceId id);
  /// A sequence of which suspend() kept something goes on; `tokens` are prompt and output so far.
  /// What features() reads comes again, as after admit().
  virtual void resume(SequenceId id, std::span<const TokenId> tokens, std::int64_t max_length);

  virtual void release(SequenceId id) = 0;
  virtual MemoryUse memory() const = 0;

  /// What one more token of depth costs to draft, as a share of a pass of a target whose weights
  /// take `target_bytes`; 0 (the default) where that is next to nothing. Decides how much is
  /// drafted.
  virtual double step_cost(std::int64_t target_bytes) const;
};

struct SPECRT_API NgramOptions {
  std::int64_t min_match = 1;  ///< shortest suffix that counts as a match, >= 1
  std::int64_t max_match = 4;  ///< longest suffix looked for, >= min_match
  bool most_recent = true;     ///< false: the earliest occurrence
  /// >= 1: how many earlier continuations make up a draft, merged by prefix. More than one makes a
  /// tree: the first has three quarters of its nodes at least.
  std::int64_t num_candidates = 1;
};

/// Prompt lookup: the longest suffix of the context, between min_match and max_match tokens,
/// that occurred earlier; the draft is what followed it. (Saxena 2023, "prompt lookup decoding".)
/// A further candidate is what the same rule finds for the text up to the earlier occurrence.
SPECRT_API std::shared_ptr<Drafter> make_ngram_drafter(const NgramOptions& options = {});

/// Drafts the last token over and over, at no cost: beside Speculation::synthetic_acceptance_rates,
/// where it does not matter what is drafted.
SPECRT_API std::shared_ptr<Drafter> make_synthetic_drafter();

/// How a draft model of another vocabulary understands the target's tokens. Only tokens that both
/// know can be drafted; the rest of the context reaches the draft model as its own tokens of the
/// same text.
struct SPECRT_API VocabularyMap {
  std::vector<TokenId> draft_of_target;  ///< -1: the draft model has no such token
  /// For target tokens without one: the draft model's tokens of their text, by target id.
  std::vector<std::vector<TokenId>> pieces;
};

struct SPECRT_API DraftModelOptions {
  std::int64_t kv_cache_bytes = 0;
  std::int64_t max_model_len = 0;  ///< 0: the draft model's own
  int max_batch_size = 32;
  int max_rows = 512;
  int block_size = 16;
  std::string kv_cache_dtype = "auto";  ///< as DecoderOptions has it; changes drafts, no text
  bool enable_prefix_caching = true;
  bool check_invariants = false;  ///< as the decoder's
  int threads = 0;
  std::shared_ptr<ThreadTeam> team;  ///< null: one of its own; the decoder's is best
  std::string cpu_isa = "auto";
  std::string device = "cpu";  ///< as DecoderOptions has it
};

/// The target's first `layers` layers draft a chain under its own norm and head (Zhang et al.
/// 2309.08168). What those layers made of committed tokens is in the target's KV cache already and
/// is read there, so this takes no weights and no cache of its own. Throws InvalidArgument where
/// `layers` is not from 1 to one less than the target has.
SPECRT_API std::shared_ptr<Drafter> make_layers_drafter(const Model& target, std::int64_t layers,
                                                        const std::string& cpu_isa = "auto");

/// What it takes, before it is made.
SPECRT_API MemoryUse memory_of_layers_drafter(const ModelConfig& target);

/// A smaller model drafts a chain (Leviathan et al. 2211.17192). Where the request samples, it
/// reads the target's noise with `coupled` verification, so that both agree as often as they can,
/// and otherwise samples by itself and tells the law that it drew from. Ids beyond
/// `target_vocab_size` are never proposed. Without `vocabulary` both have the same tokens under the
/// same ids.
SPECRT_API std::shared_ptr<Drafter> make_model_drafter(
    const Model& model, std::int64_t target_vocab_size, const DraftModelOptions& options,
    std::shared_ptr<const VocabularyMap> vocabulary = nullptr);

/// What make_model_drafter() takes, before it is made; with another vocabulary on a GPU it is less.
SPECRT_API MemoryUse memory_of_draft_model(const ModelConfig& config, Precision precision,
                                           const DraftModelOptions& options,
                                           std::int64_t target_vocab_size);

struct SPECRT_API DraftHeadOptions : DraftModelOptions {
  std::string name = "eagle";  ///< in metrics and messages
  TargetFeatures features;     ///< head.feature_parts of them
  std::int64_t depth = 8;      ///< tokens along a path, at most
  std::int64_t top_k = 1;    ///< children of a node, and nodes of a level that get any; 1: a chain
  std::int64_t modules = 1;  ///< at most depth: the k-th drafts the k-th token
  /// Target ids of the head's output vocabulary; empty: they are the same.
  std::vector<TokenId> target_of_draft;
};

/// A head over the target's hidden states drafts a chain, or a tree as EAGLE-2 grows it (Li et al.
/// 2401.15077, 2406.16858, 2503.01840; multi-token prediction, 2404.19737). Its K/V of committed
/// tokens are made of the target's own hidden states, those of draft nodes of the head's. Greedy
/// requests get the most likely children; with `coupled` verification requests that sample get
/// those that the target's noise favours, otherwise a tree of fixed shape whose children are
/// sampled without replacement. Beyond max_model_len nothing is drafted.
SPECRT_API std::shared_ptr<Drafter> make_head_drafter(const Model& head, const Model& target,
                                                      const DraftHeadOptions& options);

/// The same with a module for each of the first tokens of a path, the last one also for those
/// behind them (DeepSeek-V3's sequential multi-token prediction, 2412.19437). Module k + 1 reads
/// the states of module k and the tokens one further on, over a KV cache of its own;
/// `kv_cache_bytes` is for all of them. They have one config. `options.modules` is their number.
SPECRT_API std::shared_ptr<Drafter> make_head_drafter(std::span<const Model> modules,
                                                      const Model& target,
                                                      const DraftHeadOptions& options);

/// What make_head_drafter() takes, and the KV cache that `sequences` sequences of `tokens` tokens
/// need of it, as for decoders. `target_vocab_size` is the target's.
SPECRT_API MemoryUse memory_of(const ModelConfig& head, Precision precision,
                               const DraftHeadOptions& options, std::int64_t target_vocab_size);
SPECRT_API std::int64_t kv_cache_bytes_for(const ModelConfig& head, Precision precision,
                                           const DraftHeadOptions& options, std::int64_t sequences,
                                           std::int64_t tokens);

}  // namespace specrt
