#include "decode/acceptance.h"

#include <algorithm>
#include <cmath>

namespace specrt {

void RunningMean::observe(double x) {
  ++count_;
  const double weight = 1.0 / (static_cast<double>(count_) + kGuessWeight);
  value_ += std::max(weight, least_) * (x - value_);
}

void Acceptance::learn(std::int64_t accepted, std::int64_t decided, double next) {
  for (; known_ < decided; ++known_) {
    at_[static_cast<std::size_t>(known_)] = RunningMean(
        known_ == 0 ? guess_ : at_[static_cast<std::size_t>(known_) - 1].value(), least_);
  }
  for (std::int64_t d = 0; d < decided; ++d) {
    at_[static_cast<std::size_t>(d)].observe(d < accepted ? 1.0 : next);
  }
}

void Acceptance::observe_cut(std::int64_t accepted, double next) {
  learn(accepted, std::min(accepted + 1, kDepths), next);
}

void Acceptance::observe(std::int64_t accepted, bool rejected) {
  const std::int64_t decided = std::min(accepted + (rejected ? 1 : 0), kDepths);
  learn(accepted, decided, 0.0);
  if (rejected || decided == 0) return;
  // Accepted to its end: what lies behind may have become better since it was last decided.
  const double here = at_[static_cast<std::size_t>(decided) - 1].value();
  for (std::int64_t d = decided; d < known_; ++d) {
    RunningMean& deeper = at_[static_cast<std::size_t>(d)];
    deeper.observe(std::max(deeper.value(), here));
  }
}

Acceptance Acceptance::as_guess() const {
  Acceptance out(guess_);
  out.known_ = known_;
  for (std::int64_t d = 0; d < known_; ++d) {
    out.at_[static_cast<std::size_t>(d)] = RunningMean(at_[static_cast<std::size_t>(d)].value());
  }
  return out;
}

double Acceptance::alpha(std::int64_t depth) const {
  if (known_ == 0) return guess_;
  return at_[static_cast<std::size_t>(std::min(depth, known_)) - 1].value();
}

double Acceptance::expected(std::int64_t depth) const {
  double sum = 0.0;
  double reached = 1.0;
  for (std::int64_t d = 1; d <= std::min(depth, kDepths); ++d) {
    reached *= alpha(d);
    sum += reached;
  }
  return sum;
}

std::int64_t Calibration::class_of(double confidence) {
  // A drafter of one's own may tell anything: no cast of what an integer cannot hold.
  if (!(confidence > 0.0)) return 0;
  return static_cast<std::int64_t>(
      std::min(confidence * static_cast<double>(kClasses), static_cast<double>(kClasses - 1)));
}

void Calibration::observe(double confidence, bool accepted) {
  Class& one = classes_[static_cast<std::size_t>(class_of(confidence))];
  one.seen = one.seen * kFade + 1.0;
  one.accepted = one.accepted * kFade + (accepted ? 1.0 : 0.0);
}

double Calibration::acceptance(double confidence, double alpha) const {
  const Class& one = classes_[static_cast<std::size_t>(class_of(confidence))];
  return (one.accepted + kPriorWeight * alpha) / (one.seen + kPriorWeight);
}

// The longest draft whose speed, tokens by time, is near the best; where drafts rather fail, it
// has to gain as well.
std::int64_t Brake::depth_for(std::int64_t most_depth, const DraftCost& cost) const {
  const std::int64_t depths = std::min(most_depth, Acceptance::kDepths);
  const double per_depth = width_.value() * cost.row + cost.step;
  const auto speed = [&](double tokens, std::int64_t depth) {
    return (1.0 + tokens) / (1.0 + static_cast<double>(depth) * per_depth);
  };
  double best = 1.0;
  double tokens = 0.0;
  double reached = 1.0;
  for (std::int64_t d = 1; d <= depths; ++d) {
    reached *= acceptance_.alpha(d);
    tokens += reached;
    best = std::max(best, speed(tokens, d));
  }
  const double least = std::max(kNearBest * best, acceptance_.alpha(1) < 0.5 ? 1.0 : 0.0);
  std::int64_t chosen = 0;
  tokens = 0.0;
  reached = 1.0;
  for (std::int64_t d = 1; d <= depths; ++d) {
    reached *= acceptance_.alpha(d);
    tokens += reached;
    if (speed(tokens, d) >= least) chosen = d;
  }
  return chosen == depths ? most_depth : chosen;
}

std::int64_t Brake::limit(std::int64_t most, const DraftCost& cost) const {
  if (most <= 0) return 0;
  if (!failed_) return most;
  const double width = std::max(width_.value(), 1.0);
  const auto most_depth = static_cast<std::int64_t>(std::ceil(static_cast<double>(most) / width));
  std::int64_t depth = depth_for(most_depth, cost);
  if (depth == 0 && waited(pause_, cost)) depth = 1;
  if (depth >= most_depth) return most;
  return std::min(most, static_cast<std::int64_t>(std::ceil(static_cast<double>(depth) * width)));
}

// A probe now and then, the rarer the more it costs.
bool Brake::waited(std::int64_t pause, const DraftCost& cost) const {
  const double wait = static_cast<double>(pause) * (1.0 + kPausePerCost * (cost.row + cost.step));
  return static_cast<double>(idle_) >= wait;
}

bool Brake::probe_due(const DraftCost& cost) const {
  return waited(std::max(pause_, kFirstPause), cost);
}

void Brake::observe(std::int64_t nodes, std::int64_t depth, std::int64_t accepted, bool rejected,
                    bool counts) {
  if (nodes == 0) {
    ++idle_;
    return;
  }
  const bool paused = idle_ >= kFirstPause;
  idle_ = 0;
  if (width_.count() == 0)
    width_ = RunningMean(static_cast<double>(nodes) / static_cast<double>(depth));
  width_.observe(static_cast<double>(nodes) / static_cast<double>(depth));
  if (!counts) return;
  acceptance_.observe(accepted, rejected);
  failed_ = failed_ || rejected;
  if (accepted > 0) {
    pause_ = 0;
  } else if (rejected) {
    pause_ = paused ? std::clamp(2 * pause_, kFirstPause, kLongestPause) : kFirstPause;
  }
}

}  // namespace specrt
