#include "decode/adasd.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace specrt {
namespace {

// Gaussian kernel density estimate with Scott's bandwidth, sigma * n^(-1/5).
class Density {
 public:
  explicit Density(std::span<const double> values) : values_(values) {
    const auto n = static_cast<double>(values.size());
    mean_ = std::accumulate(values.begin(), values.end(), 0.0) / n;
    double squares = 0.0;
    for (const double x : values) squares += (x - mean_) * (x - mean_);
    width_ = std::max(std::sqrt(squares / (n - 1.0)) * std::pow(n, -0.2), kLeastWidth);
  }

  double mean() const { return mean_; }
  double at(double x) const {
    double sum = 0.0;
    for (const double value : values_) {
      const double z = (x - value) / width_;
      sum += std::exp(-0.5 * z * z);
    }
    return sum / (static_cast<double>(values_.size()) * width_);
  }

 private:
  static constexpr double kLeastWidth = 1e-3;  // all values the same
  std::span<const double> values_;
  double mean_ = 0.0;
  double width_ = 0.0;
};

constexpr int kSteps = 64;  // looked at between the means
constexpr int kBisections = 30;

}  // namespace

double js_distance(std::span<const float> p, std::span<const float> q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double a = p[i];
    const double b = i < q.size() ? q[i] : 0.0;
    const double middle = 0.5 * (a + b);
    if (a > 0.0) sum += 0.5 * a * std::log2(a / middle);
    if (b > 0.0) sum += 0.5 * b * std::log2(b / middle);
  }
  return std::sqrt(std::clamp(sum, 0.0, 1.0));
}

double entropy(std::span<const float> law) {
  double sum = 0.0;
  for (const float p : law) {
    if (p > 0.0f) sum -= double{p} * std::log(double{p});
  }
  return sum;
}

void AdaptiveThresholds::Kept::add(double value) {
  if (count < kKept) {
    values.push_back(value);
  } else {
    values[static_cast<std::size_t>(count % kKept)] = value;
  }
  ++count;
}

void AdaptiveThresholds::observe(double distance, bool exact) {
  (exact ? accepted_distances_ : rejected_distances_).add(distance);
  changed_ = true;
}

void AdaptiveThresholds::observe_rejected(double entropy) {
  ++rejected_;
  mean_entropy_ += (entropy - mean_entropy_) / static_cast<double>(rejected_);
}

void AdaptiveThresholds::settle() {
  if (!changed_) return;
  changed_ = false;
  if (accepted_distances_.count < kLeast || rejected_distances_.count < kLeast) return;
  accept_within_ = crossing(accepted_distances_.values, rejected_distances_.values);
}

double AdaptiveThresholds::crossing(std::span<const double> accepted,
                                    std::span<const double> rejected) {
  const Density near(accepted);
  const Density far(rejected);
  if (near.mean() >= far.mean()) return -1.0;  // distance tells nothing
  const auto ahead = [&](double x) { return near.at(x) - far.at(x); };
  double low = near.mean();
  if (ahead(low) <= 0.0) return -1.0;
  const double step = (far.mean() - near.mean()) / kSteps;
  for (int i = 1; i <= kSteps; ++i) {
    const double high = near.mean() + step * i;
    if (ahead(high) > 0.0) {
      low = high;
      continue;
    }
    double up = high;
    for (int k = 0; k < kBisections; ++k) {
      const double middle = 0.5 * (low + up);
      (ahead(middle) > 0.0 ? low : up) = middle;
    }
    return low;
  }
  return -1.0;
}

}  // namespace specrt
