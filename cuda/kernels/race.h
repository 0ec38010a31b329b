#pragma once

// The exponential race of cpu/body_race.h: arg-max of log-weight plus Gumbel noise. The noise is
// the core's own Philox; the smallest (key, id) wins, whoever looks for it.

#include <cmath>

#include "core/philox.h"
#include "kernels/sampling_state.h"

namespace specrt::cuda {

struct RaceBest {
  double key = 0.0;
  std::int32_t id = -1;  ///< -1: nobody yet
  float bound = 0.0f;  ///< a little above key; no id whose uniform is not below bound * weight wins

  SPECRT_KERNEL bool beaten_by(double other_key, std::int32_t other_id) const {
    return other_id >= 0 && (id < 0 || other_key < key || (other_key == key && other_id < id));
  }

  SPECRT_KERNEL void enter(std::uint32_t bits, float weight, std::int32_t other_id) {
    if (!(weight > 0.0f)) return;
    const double u = uniform_from_bits(bits);
    // -log1p(-u) is at least u: the logarithm is for a few ids only.
    if (id >= 0 && !(static_cast<float>(u) * 0.999999f < bound * weight)) return;
    const double other_key = -log1p(-u) / static_cast<double>(weight);
    if (!beaten_by(other_key, other_id)) return;
    key = other_key;
    id = other_id;
    const double above = key * (1.0 + 1e-5);
    bound = above > 3.4028234e38    ? infinity()
            : above < 1.1754944e-38 ? 1.1754944e-38f
                                    : static_cast<float>(above);
  }
};

template <class Block>
SPECRT_KERNEL RaceBest warp_best(const Block& block, RaceBest best) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const double key = block.shuffle_xor(best.key, mask);
    const std::int32_t id = block.shuffle_xor(best.id, mask);
    if (best.beaten_by(key, id)) {
      best.key = key;
      best.id = id;
    }
  }
  return best;
}

SPECRT_KERNEL std::uint32_t choice_noise(const SamplingState& state, std::int32_t position,
                                         std::int32_t id) {
  return noise_bits(state.seed, state.sample_index, static_cast<std::uint32_t>(position),
                    purpose_word(Purpose::target_choice), static_cast<std::uint32_t>(id));
}

/// The noise of four neighbours, the first a multiple of four.
struct Noise {
  std::array<std::uint32_t, 4> words{};
  SPECRT_KERNEL Noise(const SamplingState& state, std::int32_t position, bool wanted,
                      std::int64_t first) {
    if (!wanted) return;
    words = philox4x32(
        {static_cast<std::uint32_t>(first / 4), static_cast<std::uint32_t>(position),
         state.sample_index, purpose_word(Purpose::target_choice)},
        {static_cast<std::uint32_t>(state.seed), static_cast<std::uint32_t>(state.seed >> 32)});
  }
};

}  // namespace specrt::cuda
