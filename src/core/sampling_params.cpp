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
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature",
          "a finite number >= 0", temperature);
  require(top_k >= 0, "top_k", "an integer >= 0 (0 for no limit)", top_k);
  require(top_p > 0.0 && top_p <= 1.0, "top_p", "a number in (0, 1]", top_p);
  require(min_p >= 0.0 && min_p <= 1.0, "min_p", "a number in [0, 1]", min_p);
  const std::string size = std::to_string(vocab_size);
  for (const TokenId id : stop_token_ids) {
    require(id >= 0 && id < vocab_size, "stop_token_ids", "ids in [0, " + size + ")", id);
  }
  require(logprobs >= -1 && logprobs <= vocab_size, "logprobs",
          "an integer in [-1, " + size + "] (-1 for none)", logprobs);
}

}  // namespace specrt
