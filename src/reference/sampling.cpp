#include <cmath>

#include "core/philox.h"
#include "reference/kernels.h"

namespace specrt::reference {

Vector exp_weights(const Vector& x, double max, double inv_temperature) {
  Vector out;
  for (const double value : x) out.push_back(std::exp((value - max) * inv_temperature));
  return out;
}

Vector normalized(const Vector& x) {
  double sum = 0.0;
  for (const double value : x) sum += value;
  Vector out;
  for (const double value : x) out.push_back(value / sum);
  return out;
}

cpu::Race race(const std::vector<float>& weights, const std::vector<std::int32_t>& ids,
               const cpu::NoiseKey& key) {
  cpu::Race best;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] > 0.0f)) continue;
    const std::int64_t id = ids.empty() ? static_cast<std::int64_t>(i) : ids[i];
    const double u = uniform_from_bits(noise_bits(key.seed, key.sample_index, key.position,
                                                  key.purpose, static_cast<std::uint32_t>(id)));
    const double arrival = -std::log1p(-u) / static_cast<double>(weights[i]);
    const bool earlier = arrival < best.key || (arrival == best.key && id < best.token);
    if (best.token < 0 || earlier) best = {id, arrival};
  }
  return best;
}

}  // namespace specrt::reference
