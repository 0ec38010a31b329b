#include <cmath>
#include <sstream>
#include <string>

#include "specrt/error.h"
#include "specrt/sampling.h"

namespace specrt {
namespace {

template <typename T>
void require(bool condition, const char* what, const std::string& expected, T got) {
  if (condition) return;
  std::ostringstream text;
  text << got;
  throw InvalidArgument(expected_got(what, expected, text.str()));
}

}  // namespace

// Written so that a NaN fails every comparison.
void SamplingParams::check(std::int64_t vocab_size) const {
  require(max_tokens >= 0, "max_tokens", "an integer >= 0", max_tokens);
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature", "a finite number >= 0",
          temperature);
  require(top_k >= 0, "top_k", "an integer >= 0 (0 for no limit)", top_k);
  require(top_p > 0.0 && top_p <= 1.0, "top_p", "a number in (0, 1]", top_p);
  require(min_p >= 0.0 && min_p <= 1.0, "min_p", "a number in [0, 1]", min_p);
  require(min_tokens >= 0 && min_tokens <= max_tokens, "min_tokens",
          "an integer from 0 to max_tokens = " + std::to_string(max_tokens), min_tokens);
  require(static_cast<float>(repetition_penalty) > 0.0f &&
              std::isfinite(static_cast<float>(repetition_penalty)),
          "repetition_penalty", "a finite number > 0, in float32", repetition_penalty);
  require(std::fabs(frequency_penalty) <= 100.0, "frequency_penalty", "a number in [-100, 100]",
          frequency_penalty);
  require(std::fabs(presence_penalty) <= 100.0, "presence_penalty", "a number in [-100, 100]",
          presence_penalty);
  const std::string size = std::to_string(vocab_size);
  for (const auto& [id, bias] : logit_bias) {
    require(id >= 0 && id < vocab_size, "logit_bias", "ids in [0, " + size + ")", id);
    require(!std::isnan(bias) && bias < HUGE_VALF, "logit_bias", "numbers below infinity", bias);
  }
  for (const TokenId id : allowed_token_ids) {
    require(id >= 0 && id < vocab_size, "allowed_token_ids", "ids in [0, " + size + ")", id);
  }
  for (const auto& word : bad_words) {
    require(!word.empty(), "bad_words", "at least one token each", "none");
    for (const TokenId id : word) {
      require(id >= 0 && id < vocab_size, "bad_words", "ids in [0, " + size + ")", id);
    }
  }
  for (const TokenId id : stop_token_ids) {
    require(id >= 0 && id < vocab_size, "stop_token_ids", "ids in [0, " + size + ")", id);
  }
  if (verification == Verification::typical) {
    require(posterior_threshold > 0.0 && posterior_threshold <= 1.0, "posterior_threshold",
            "a number in (0, 1]", posterior_threshold);
    require(posterior_alpha > 0.0 && std::isfinite(posterior_alpha), "posterior_alpha",
            "a finite number > 0", posterior_alpha);
  } else {
    const SamplingParams untouched;
    const bool same = posterior_threshold == untouched.posterior_threshold &&
                      posterior_alpha == untouched.posterior_alpha;
    require(same, "posterior_threshold and posterior_alpha", "'typical' verification with them",
            name_of(verification));
  }
  speculation.check();
  if (speculation.synthetic()) {
    require(verification == Verification::coupled, "verification",
            "'coupled' with synthetic acceptance", name_of(verification));
    require(speculation.policy != Policy::adasd, "policy",
            "one without a rule of acceptance of its own with synthetic acceptance",
            name_of(speculation.policy));
  }
  if (speculation.policy == Policy::adasd) {
    require(verification == Verification::coupled, "verification", "'coupled' with policy 'adasd'",
            name_of(verification));
  }
  require(prompt_logprobs >= -1 && prompt_logprobs <= vocab_size, "prompt_logprobs",
          "an integer in [-1, " + size + "] (-1 for none)", prompt_logprobs);
  require(logprobs >= -1 && logprobs <= vocab_size, "logprobs",
          "an integer in [-1, " + size + "] (-1 for none)", logprobs);
}

const char* name_of(Verification verification) {
  switch (verification) {
    case Verification::coupled:
      return "coupled";
    case Verification::rejection:
      return "rejection";
    case Verification::block:
      return "block";
    case Verification::typical:
      return "typical";
  }
  return "unknown";
}

Verification verification_from_name(const std::string& name) {
  for (const Verification one : {Verification::coupled, Verification::rejection,
                                 Verification::block, Verification::typical}) {
    if (name == name_of(one)) return one;
  }
  throw InvalidArgument(expected_got("verification", "coupled, rejection, block or typical", name));
}

}  // namespace specrt
