#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "specrt/export.h"
#include "specrt/speculation.h"
#include "specrt/types.h"

namespace specrt {

/// How a draft is checked against the target.
enum class Verification : std::uint8_t {
  coupled = 0,  ///< the target's own choice decides; output does not depend on the draft
  rejection,    ///< Leviathan/Chen for chains, multi-round for trees: the target's law
  block,        ///< block verification (Sun et al. 2403.10444) of chains: the target's law
  typical,      ///< typical acceptance (Medusa, Cai et al. 2401.10774): lossy
};

SPECRT_API Verification verification_from_name(const std::string& name);
SPECRT_API const char* name_of(Verification verification);

/// How the next token of one sequence is chosen. Logits pass, in this order, through repetition,
/// frequency and presence penalties, logit_bias, then the masks (allowed_token_ids, bad_words,
/// min_tokens, a TokenConstraint); then temperature, top_k, top_p, min_p, each on what the one
/// before left, as in Hugging Face transformers.
struct SPECRT_API SamplingParams {
  std::int64_t max_tokens = 16;     ///< tokens to generate, >= 0
  std::int64_t min_tokens = 0;      ///< no stop token before so many
  double temperature = 0.0;         ///< < 1e-5 means greedy
  std::int64_t top_k = 0;           ///< 0: no limit
  double top_p = 1.0;               ///< (0, 1]
  double min_p = 0.0;               ///< [0, 1]
  double repetition_penalty = 1.0;  ///< > 0; over prompt and output (Keskar et al. 1909.05858)
  double frequency_penalty = 0.0;   ///< times a token's count in the output, subtracted
  double presence_penalty = 0.0;    ///< subtracted once a token is in the output
  std::vector<std::pair<TokenId, float>> logit_bias;
  std::vector<TokenId> allowed_token_ids;       ///< empty: all
  std::vector<std::vector<TokenId>> bad_words;  ///< token sequences that may not be completed
  std::uint64_t seed = 0;
  std::uint32_t sample_index = 0;       ///< among the n samples of one prompt
  std::vector<TokenId> stop_token_ids;  ///< each ends the sequence; the model's EOS belongs here
  Verification verification = Verification::coupled;
  Speculation speculation;
  double posterior_threshold = 0.09;  ///< `typical` only, (0, 1]: probability that is enough
  double posterior_alpha = 0.3;       ///< `typical` only, > 0: and so is this times exp(-entropy)
  std::int32_t logprobs = -1;         ///< -1: none; k >= 0: the chosen token's and the top k
  std::int32_t prompt_logprobs = -1;  ///< the same for the prompt's tokens; >= 0 skips prefix reuse

  static constexpr double kGreedyBelow = 1e-5;
  bool greedy() const { return temperature < kGreedyBelow; }
  /// Whether a drafter that samples does so with the target's own noise; else it samples by itself
  /// and tells its law.
  bool follows_target_noise() const {
    return greedy() || verification == Verification::coupled ||
           verification == Verification::typical;
  }

  /// Whether a draft has a say in the text: with drafts of another length, a seed would give
  /// another one.
  bool draft_changes_text() const { return !greedy() && verification != Verification::coupled; }
  /// Whether what comes out may not follow the target's law.
  bool lossy() const {
    return verification == Verification::typical || speculation.policy == Policy::adasd ||
           speculation.synthetic();
  }

  /// Throws InvalidArgument naming the first field out of range.
  void check(std::int64_t vocab_size) const;
};

}  // namespace specrt
