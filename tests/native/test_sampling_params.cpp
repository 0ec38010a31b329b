#include <cmath>
#include <limits>

#include "check.h"
#include "specrt/error.h"
#include "specrt/sampling.h"

using specrt::InvalidArgument;
using specrt::SamplingParams;

namespace {

template <typename Field, typename Value>
SamplingParams with(Field SamplingParams::* field, Value value) {
  SamplingParams params;
  params.*field = static_cast<Field>(value);
  return params;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

TEST(sampling_params_defaults_are_greedy) {
  const SamplingParams params;
  params.check(1);
  CHECK(params.greedy());
  CHECK_EQ(params.logprobs, -1);
  CHECK_EQ(params.top_p, 1.0);
}

TEST(sampling_params_greedy_below) {
  CHECK(with(&SamplingParams::temperature, 9.9e-6).greedy());
  CHECK(!with(&SamplingParams::temperature, 1e-5).greedy());
}

TEST(sampling_params_edges_are_accepted) {
  with(&SamplingParams::max_tokens, 0).check(8);
  with(&SamplingParams::temperature, 1e30).check(8);
  with(&SamplingParams::top_k, 1000).check(8);
  with(&SamplingParams::top_p, 1e-300).check(8);
  with(&SamplingParams::min_p, 1.0).check(8);
  with(&SamplingParams::logprobs, 8).check(8);
  with(&SamplingParams::logprobs, 0).check(8);
  SamplingParams stops;
  stops.stop_token_ids = {0, 7, 7};
  stops.check(8);
}

TEST(sampling_params_refuses) {
  const auto refuse = [](const SamplingParams& params, const char* text) {
    CHECK_THROWS(params.check(8), InvalidArgument, text);
  };
  refuse(with(&SamplingParams::max_tokens, -1), "[max_tokens] expected an integer >= 0, got -1");
  for (const double value : {-0.5, kNan, kInfinity}) {
    refuse(with(&SamplingParams::temperature, value), "[temperature]");
  }
  refuse(with(&SamplingParams::top_k, -1), "[top_k]");
  for (const double value : {0.0, -0.1, 1.0001, kNan, kInfinity}) {
    refuse(with(&SamplingParams::top_p, value), "[top_p] expected a number in (0, 1]");
  }
  for (const double value : {-0.1, 1.0001, kNan}) {
    refuse(with(&SamplingParams::min_p, value), "[min_p] expected a number in [0, 1]");
  }
  refuse(with(&SamplingParams::logprobs, -2), "[logprobs]");
  refuse(with(&SamplingParams::logprobs, 9), "[logprobs] expected an integer in [-1, 8]");
  SamplingParams stops;
  stops.stop_token_ids = {1, 8};
  refuse(stops, "[stop_token_ids] expected ids in [0, 8), got 8");
  stops.stop_token_ids = {-1};
  refuse(stops, "[stop_token_ids]");
}
