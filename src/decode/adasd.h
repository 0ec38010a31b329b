#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace specrt {

/// Square root of the Jensen-Shannon divergence in base 2, in [0, 1]. Where `q` is the shorter one
/// its rest is 0.
double js_distance(std::span<const float> p, std::span<const float> q);

/// In nats.
double entropy(std::span<const float> law);

/// The two thresholds of AdaSD (2512.11280), learnt from one request. Drafting stops behind a token
/// whose law has more entropy than those of rejected ones had on average. A token is accepted
/// whose laws, draft's and target's, are nearer than where the densities of distances of exactly
/// accepted and of exactly rejected tokens cross (Gaussian kernels, Scott's bandwidth); until
/// kLeast of both are known, only exactly accepted ones are.
class AdaptiveThresholds {
 public:
  static constexpr std::int64_t kLeast = 16;
  static constexpr std::int64_t kKept = 256;         ///< the newest so many of each
  static constexpr double kLeastProbability = 1e-4;  ///< of the target, for any acceptance

  /// A drafted token that was reached; `exact`: it is the target's own choice.
  void observe(double distance, bool exact);
  void observe_rejected(double entropy);
  /// A round is over: what it showed counts from now on.
  void settle();

  double stop_above() const { return rejected_ > 0 ? mean_entropy_ : kInfinity; }
  double accept_within() const { return accept_within_; }  ///< -1: exact ones only

  /// Where the densities of both cross, coming from the accepted ones' mean; -1 where they do not
  /// on the way to the other's. Takes time by `accepted` + `rejected`.
  static double crossing(std::span<const double> accepted, std::span<const double> rejected);

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Kept {
    std::vector<double> values;
    std::int64_t count = 0;
    void add(double value);
  };

  Kept accepted_distances_;
  Kept rejected_distances_;
  bool changed_ = false;
  double accept_within_ = -1.0;
  double mean_entropy_ = 0.0;
  std::int64_t rejected_ = 0;
};

}  // namespace specrt
