#include "specrt/speculation.h"

#include <cmath>
#include <string>

#include "specrt/error.h"

namespace specrt {
namespace {

constexpr Policy kPolicies[] = {Policy::fixed,   Policy::brake, Policy::ema_tiers,
                                Policy::goodput, Policy::adasd, Policy::off};

// Written so that a NaN fails.
void check_target(const char* name, double seconds, Policy policy) {
  if (!(seconds >= 0.0 && std::isfinite(seconds))) {
    throw InvalidArgument(
        expected_got(name, "a finite number >= 0 (0 for none)", std::to_string(seconds)));
  }
  if (seconds > 0.0 && policy != Policy::goodput) {
    throw InvalidArgument(expected_got(name, "policy 'goodput' with it", name_of(policy)));
  }
}

}  // namespace

const char* name_of(Policy policy) {
  switch (policy) {
    case Policy::fixed:
      return "fixed";
    case Policy::brake:
      return "brake";
    case Policy::ema_tiers:
      return "ema_tiers";
    case Policy::goodput:
      return "goodput";
    case Policy::adasd:
      return "adasd";
    case Policy::off:
      return "off";
  }
  return "unknown";
}

Policy policy_from_name(const std::string& name) {
  for (const Policy one : kPolicies) {
    if (name == name_of(one)) return one;
  }
  throw InvalidArgument(
      expected_got("policy", "fixed, brake, ema_tiers, goodput, adasd or off", name));
}

void Speculation::check() const {
  if (num_speculative_tokens < -1) {
    throw InvalidArgument(expected_got("num_speculative_tokens",
                                       "an integer >= 0, or -1 for the plan's",
                                       std::to_string(num_speculative_tokens)));
  }
  if (policy == Policy::off && num_speculative_tokens > 0) {
    throw InvalidArgument(expected_got("num_speculative_tokens",
                                       "a policy other than 'off' with it",
                                       std::to_string(num_speculative_tokens)));
  }
  check_target("target_tpot_seconds", target_tpot_seconds, policy);
  check_target("target_ttft_seconds", target_ttft_seconds, policy);
  for (const double rate : synthetic_acceptance_rates) {
    if (!(rate >= 0.0 && rate <= 1.0)) {
      throw InvalidArgument(
          expected_got("synthetic_acceptance_rates", "numbers in [0, 1]", std::to_string(rate)));
    }
  }
}

}  // namespace specrt
