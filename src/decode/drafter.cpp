#include "specrt/drafter.h"

#include <limits>

namespace specrt {

Drafter::~Drafter() = default;  // here, so that the type information has one home

const TargetFeatures& Drafter::features() const {
  static const TargetFeatures none;
  return none;
}

std::int64_t Drafter::known_positions(SequenceId) const {
  const TargetFeatures& wanted = features();
  return wanted.any() && !wanted.last_only ? 0 : std::numeric_limits<std::int64_t>::max();
}

void Drafter::observe_features(std::span<const ObservedFeatures>) {}

void Drafter::finished(SequenceId, std::span<const TokenId>) {}

bool Drafter::suspend(SequenceId id) {
  release(id);
  return false;
}

void Drafter::resume(SequenceId, std::span<const TokenId>, std::int64_t) {}

double Drafter::step_cost(std::int64_t) const { return 0.0; }

}  // namespace specrt
