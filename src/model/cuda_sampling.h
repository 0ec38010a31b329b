#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/sampling_state.h"
#include "specrt/sampling.h"

namespace specrt {

/// What a sequence's parameters say of temperature, filters and noise; its logits pass unchanged.
inline cuda::SamplingState sampling_state(const SamplingParams& params) {
  cuda::SamplingState state;
  if (!params.greedy()) {
    state.temperature = static_cast<float>(params.temperature);
    state.inv_temperature = static_cast<float>(1.0 / params.temperature);
  }
  state.top_k = static_cast<std::int32_t>(std::min<std::int64_t>(params.top_k, INT32_MAX));
  state.top_p = params.top_p;
  state.min_p = params.min_p;
  state.seed = params.seed;
  state.sample_index = params.sample_index;
  return state;
}

}  // namespace specrt
