#include "specrt/features.h"

#include <algorithm>
#include <string>

#include "specrt/error.h"

namespace specrt {

bool TargetFeatures::cover(const TargetFeatures& other) const {
  if (other.normed && !normed) return false;
  return std::all_of(other.layers.begin(), other.layers.end(), [this](std::int64_t layer) {
    return std::find(layers.begin(), layers.end(), layer) != layers.end();
  });
}

void TargetFeatures::check(std::int64_t num_layers) const {
  for (const std::int64_t layer : layers) {
    if (layer < 0 || layer > num_layers) {
      throw InvalidArgument(expected_got(
          "features",
          "layers from 0 to " + std::to_string(num_layers) + ", the target's number of layers",
          std::to_string(layer)));
    }
  }
}

}  // namespace specrt
