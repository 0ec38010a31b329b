#include "decode/chain_draft.h"

#include <cmath>

#include "core/philox.h"
#include "decode/adasd.h"
#include "decode/logits_state.h"
#include "specrt/error.h"

namespace specrt {

void ChainDraft::draw(Chooser& chooser, std::span<const float> logits) {
  try {
    draw_one(chooser, logits);
  } catch (const Error&) {
    steps = 0;
  }
}

void ChainDraft::draw_one(Chooser& chooser, std::span<const float> logits) {
  LogitsState* state = request->logits;
  const SamplingParams& params = *request->sampling;
  const std::span<const float> row =
      state == nullptr ? logits : chooser.processed(logits, *state, grammar_here());
  const auto start = static_cast<std::int64_t>(request->tokens.size());
  const std::int64_t position = start + static_cast<std::int64_t>(tree->size());
  const auto parent = static_cast<std::int32_t>(tree->size()) - 1;
  TokenId token = 0;
  float log_prob = 0.0f;
  if (params.follows_target_noise()) {
    token = chooser.choose(row, params, position);
    log_prob = chooser.logprob(row, token);
    if (params.speculation.policy == Policy::adasd) {
      const std::span<const float> law = chooser.softened(row, params);
      tree->set_distribution(parent, law);
      if (entropy(law) > request->stop_entropy) steps = 0;  // this one is the last
    }
  } else {
    const std::span<const float> law = chooser.distribution(row, params);
    const std::uint32_t purpose = params.verification == Verification::block
                                      ? purpose_word(Purpose::draft, start)
                                      : purpose_word(Purpose::draft);
    token = chooser.draw(law, params, position, purpose);
    log_prob = std::log(law[static_cast<std::size_t>(token)]);
    tree->set_draw(Draw::without_replacement);
    tree->set_distribution(parent, law);
  }
  tree->add(token, parent, log_prob);
  if (state != nullptr) state->push(token);
  if (grammar == nullptr) return;
  grammar->advance(token);
  if (grammar->finished()) steps = 0;
}

// The grammar at the end of the draft so far.
TokenConstraint* ChainDraft::grammar_here() {
  TokenConstraint* const own = request->logits->constraint();
  if (own != nullptr && grammar == nullptr) grammar = own->fork();
  return grammar.get();
}

void ChainDraft::forget_guesses() const {
  if (request->logits == nullptr) return;
  const std::span<const TokenId> tokens = tree->tokens();
  for (auto token = tokens.rbegin(); token != tokens.rend(); ++token) request->logits->pop(*token);
}

}  // namespace specrt
