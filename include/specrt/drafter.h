#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/cpu.h"
#include "specrt/draft_tree.h"
#include "specrt/export.h"
#include "specrt/memory.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

class LogitsState;
class Model;

/// What a drafter is asked for, one sequence.
struct DraftRequest {
  SequenceId id = 0;
  std::span<const TokenId> tokens;  ///< prompt and everything committed so far
  std::int64_t max_nodes = 0;       ///< >= 0; 0 asks for nothing
  std::int64_t max_depth = 0;       ///< deeper nodes could never be used
  const SamplingParams* sampling = nullptr;
  LogitsState* logits = nullptr;  ///< the sequence's penalties and masks; for built-in drafters
};

/// Proposes continuations. The target decides what becomes of them, so a drafter can cost time
/// but never change the output; with `rejection` and `block`, never its law, as long as a sampled
/// draft tells the distributions that it came from. Called from one thread at a time.
class SPECRT_API Drafter {
 public:
  Drafter() = default;
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  virtual ~Drafter();

  virtual const std::string& name() const = 0;

  /// A sequence starts. `max_length` bounds its tokens, prompt included.
  virtual void admit(SequenceId id, std::span<const TokenId> prompt, std::int64_t max_length) = 0;

  /// Fills out[i] for requests[i]; an empty tree is a fine answer.
  virtual void propose(std::span<const DraftRequest> requests, std::span<DraftTree> out) = 0;

  /// Tokens that the target chose and committed, but for those of a sequence's last round.
  virtual void observe(SequenceId id, std::span<const TokenId> committed) = 0;

  /// A sequence has come to its end; `tokens` are prompt and output. Nothing, unless overridden.
  virtual void finished(SequenceId id, std::span<const TokenId> tokens);

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
};

/// A smaller model drafts a chain (Leviathan et al. 2211.17192). Where the request samples, it
/// reads the target's noise with `coupled` verification, so that both agree as often as they can,
/// and otherwise samples by itself and tells the law that it drew from. Ids beyond
/// `target_vocab_size` are never proposed. Without `vocabulary` both have the same tokens under the
/// same ids.
SPECRT_API std::shared_ptr<Drafter> make_model_drafter(
    const Model& model, std::int64_t target_vocab_size, const DraftModelOptions& options,
    std::shared_ptr<const VocabularyMap> vocabulary = nullptr);

}  // namespace specrt
