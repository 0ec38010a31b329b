#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "decode/choose.h"
#include "specrt/constraint.h"
#include "specrt/drafter.h"

namespace specrt {

/// A chain that grows by one token at a time, each drawn from logits: how drafters that run a model
/// step by step draw, whatever the model.
struct ChainDraft {
  const DraftRequest* request = nullptr;
  DraftTree* tree = nullptr;
  std::int64_t steps = 0;  ///< tokens to draft; what is over has 0
  /// Follows the draft where the request has a grammar; then what it forbids is not even drafted.
  std::unique_ptr<TokenConstraint> grammar = nullptr;

  /// The next token, from its logits by target id. `coupled` and `typical`: with the target's own
  /// noise, so that both choose alike as often as they can. `rejection` and `block`: a sample of
  /// its own, with the law that it came from. The request's penalties and masks apply. Logits gone
  /// NaN, or a grammar that gives up or leaves nothing to say, end the draft, not the request.
  void draw(Chooser& chooser, std::span<const float> logits);

  /// Takes back what draw() told the request's LogitsState; to be called once, after the last.
  void forget_guesses() const;

 private:
  void draw_one(Chooser& chooser, std::span<const float> logits);
  TokenConstraint* grammar_here();
};

}  // namespace specrt
