#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "cpu/kernels.h"
#include "specrt/constraint.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

/// What one sequence's history and parameters do to its logits before temperature. Tokens are
/// pushed as they are chosen; a drafter may push its guesses and pop them again.
class LogitsState {
 public:
  LogitsState() = default;
  /// `prompt` counts for the repetition penalty and for bad words.
  LogitsState(const SamplingParams& params, std::span<const TokenId> prompt,
              std::int64_t vocab_size, std::shared_ptr<TokenConstraint> constraint);

  /// Whether logits pass unchanged whatever the history: then process() need not be called.
  bool neutral() const { return neutral_; }

  /// Rewrites one row of logits in place. `constraint` is the sequence's own, or one that has
  /// followed the tokens pushed since; null leaves the grammar out.
  void process(const cpu::Kernels& kernels, std::span<float> logits, TokenConstraint* constraint);

  void push(TokenId token);
  void pop(TokenId token);  ///< the last one pushed
  /// Tells the constraint; only for tokens that the target chose.
  void commit(TokenId token);

  bool finished() const { return constraint_ != nullptr && constraint_->finished(); }
  TokenConstraint* constraint() const { return constraint_.get(); }

  // For whoever does the same elsewhere (CudaWalk).
  struct Seen {
    bool in_prompt = false;
    std::int64_t in_output = 0;
  };
  bool penalties() const { return penalties_; }
  const std::unordered_map<TokenId, Seen>& seen() const { return seen_; }
  std::span<const TokenId> tail() const { return tail_; }  ///< where there are bad words
  std::int64_t generated() const { return generated_; }
  std::span<const std::uint32_t> allowed() const { return allowed_; }

 private:
  void penalise(std::span<float> logits) const;
  void mask(const cpu::Kernels& kernels, std::span<float> logits, TokenConstraint* constraint);

  SamplingParams params_;
  bool neutral_ = true;
  bool penalties_ = false;
  std::unordered_map<TokenId, Seen> seen_;
  std::vector<TokenId> tail_;  // prompt's end and output, for bad words
  std::int64_t generated_ = 0;
  std::shared_ptr<TokenConstraint> constraint_;
  std::vector<std::uint32_t> bits_;
  std::vector<std::uint32_t> allowed_;  // allowed_token_ids as bits
};

}  // namespace specrt
