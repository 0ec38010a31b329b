#include "decode/ema_tiers.h"

#include <cstdlib>

namespace specrt {

std::vector<EmaTiers::Tier> EmaTiers::defaults() {
  return {{1, {1, 3, 5, 7}}, {8, {0, 1, 3}, 0.0}, {32, {0, 1}}, {64, {0}}};
}

EmaTiers::EmaTiers(std::vector<Tier> tiers) {
  for (Tier& tier : tiers) states_.push_back({std::move(tier)});
}

std::size_t EmaTiers::tier_of(std::int64_t batch) const {
  std::size_t found = 0;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].tier.least_batch <= batch) found = i;
  }
  return found;
}

std::size_t EmaTiers::State::first(std::int64_t initial) const {
  const std::vector<std::int64_t>& candidates = tier.candidates;
  if (initial < 0) return candidates.size() / 2;
  std::size_t nearest = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    if (std::abs(candidates[i] - initial) < std::abs(candidates[nearest] - initial)) nearest = i;
  }
  return nearest;
}

std::int64_t EmaTiers::steps(std::int64_t batch, std::int64_t initial) const {
  const State& state = states_[tier_of(batch)];
  return state.tier.candidates[state.started ? state.at : state.first(initial)];
}

void EmaTiers::observe(std::int64_t batch, std::int64_t initial, double mean_accepted) {
  State& state = states_[tier_of(batch)];
  if (!state.started) {
    state.started = true;
    state.at = state.first(initial);
    state.ema = state.value(state.at) - 1.0;
  }
  if (state.tier.candidates[state.at] > 0) {
    state.ema = (1.0 - kAlpha) * state.ema + kAlpha * mean_accepted;
  }
  ++state.batches;
  if (state.batches > kWarmup && (state.batches - kWarmup) % kInterval == 0) state.move();
}

void EmaTiers::State::move() {
  bool moved = false;
  while (at > 0) {
    const double below = tier.candidates[at - 1] == 0 ? 0.5 : value(at - 1) - 0.5;
    if (ema > below + tier.down_hysteresis) break;
    --at;
    moved = true;
  }
  // From no drafts at all the way up is always open: a probe.
  while (!moved && at + 1 < tier.candidates.size() && ema > value(at) - 0.5 + kUpHysteresis) ++at;
}

}  // namespace specrt
