#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "decode/acceptance.h"
#include "decode/adasd.h"
#include "decode/logits_state.h"
#include "decode/rejection.h"
#include "decode/typical.h"
#include "decode/verify.h"
#include "specrt/decoder.h"

namespace specrt {

/// One sequence inside a Decoder.
struct Sequence {
  SequenceId id = 0;
  SamplingParams params;
  std::shared_ptr<Drafter> drafter;
  std::vector<TokenId> tokens;  // prompt and generated
  std::int64_t prompt_tokens = 0;
  std::int64_t prefill_tokens = 0;  // to process before it decodes: the prompt, or, after a
                                    // preemption, all tokens but the last
  std::int64_t processed = 0;       // of these, with K/V in the cache
  std::int64_t max_length = 0;      // of tokens
  SequenceCounters counters;
  double step_cost = 0.0;  // Drafter::step_cost of its drafter
  Brake brake;
  Acceptance expected;            // of its drafts, for `goodput`
  AdaptiveThresholds thresholds;  // of `adasd`
  std::chrono::steady_clock::time_point arrived;
  std::chrono::steady_clock::time_point first_token;
  LogitsState state;  // history, penalties, masks
  std::vector<TokenLogprobs> prompt_logprobs;
  bool prompt_told = false;
  bool drafter_kept = false;           // while preempted: its drafter holds something of it
  std::vector<const float*> features;  // what its drafter reads of the target; see Runner::captured

  // This round.
  std::int64_t planned = 0;
  std::int64_t asked = 0;  // draft nodes; `planned` becomes rows
  bool in_pass = false;
  std::int64_t prompt_rows = 0;  // prompt tokens in the pass
  bool wants_choice = false;     // its walk needs logits
  bool on_device = false;        // its walk is the GPU's
  bool pruned = false;           // limits cut the draft short
  double trimmed = -1.0;         // a chain was cut at a node this likely to be accepted; -1: not
  DraftTree draft;
  TreeWalk walk;
  BlockWalk block;
  std::vector<float> last_logits;  // block verification with logprobs: of the last accepted node
  TypicalWalk typical;
  TokenId behind = 0;  // typical acceptance: the token behind the leading node
  TokenLogprobs behind_logprobs;
  std::vector<TokenLogprobs> node_logprobs;  // typical acceptance: of accepted nodes
  std::int64_t root_row = 0;
  std::int64_t tree_row = 0;
  bool captured = false;
  std::vector<std::int64_t> feature_rows;  // of committed tokens, in order
  std::int64_t first_feature = 0;          // the position of the first of them
  std::vector<TokenLogprobs> logprobs;
  Finish finish = Finish::none;
  std::string error;

  bool prefilling() const { return processed < prefill_tokens; }
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t tokens_left() const { return max_length - length(); }
  bool is_stop(TokenId token) const;
  bool verifies_block() const {
    return params.verification == Verification::block && !params.greedy() && !draft.empty();
  }
  bool verifies_typical() const {
    return params.verification == Verification::typical && !params.greedy() && !draft.empty();
  }
  bool verifies_adasd() const {
    return params.speculation.policy == Policy::adasd && !draft.empty();
  }
  /// The node whose logits its walk waits for.
  std::int32_t awaited() const {
    if (verifies_block()) return block.node();
    return verifies_typical() ? typical.node() : walk.node();
  }
  /// Whether a choice looks at nothing but the largest of the raw logits.
  bool wants_best_only() const {
    return params.greedy() && params.logprobs < 0 && !wants_prompt_logprobs() && state.neutral() &&
           !verifies_adasd();
  }
  /// Whether a GPU can decide it by itself. Follows from the request alone, so that who decides
  /// does not depend on drafts or batches.
  bool decides_on_device() const {
    const bool coupled = params.greedy() || params.verification == Verification::coupled;
    return coupled && params.logprobs < 0 && params.prompt_logprobs < 0 &&
           state.constraint() == nullptr && params.speculation.policy != Policy::adasd &&
           !params.speculation.synthetic();
  }
  bool wants_prompt_logprobs() const {
    return params.prompt_logprobs >= 0 && !prompt_told && prefilling();
  }
};

/// Counts a decoding round that emitted `emitted` tokens; `sign` -1 takes it back.
void count_round(const Sequence& sequence, std::int64_t emitted, bool truncated, std::int64_t sign,
                 SequenceCounters& counters);
/// Whether a limit or a stop cut the round that the sequence has just finished.
bool was_truncated(const Sequence& sequence);

}  // namespace specrt
