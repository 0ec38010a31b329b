#pragma once

#include <cstdint>
#include <vector>

namespace specrt {

/// SGLang's adaptive number of draft steps: tiers by batch size, each with candidates among which a
/// running mean of accepted drafts moves, with hysteresis, after a warm-up. Parameters, defaults
/// and rule are SGLang's.
class EmaTiers {
 public:
  struct Tier {
    std::int64_t least_batch = 1;
    std::vector<std::int64_t> candidates;  // rising
    double down_hysteresis = kDownHysteresis;
  };
  static constexpr double kAlpha = 0.2;
  static constexpr std::int64_t kInterval = 5;  // batches between moves
  static constexpr std::int64_t kWarmup = 10;   // batches before the first
  static constexpr double kUpHysteresis = 0.0;
  static constexpr double kDownHysteresis = -0.25;

  EmaTiers() : EmaTiers(defaults()) {}
  explicit EmaTiers(std::vector<Tier> tiers);
  static std::vector<Tier> defaults();

  /// Steps for a batch of so many sequences. A tier starts at the candidate nearest to `initial`,
  /// the lower of two, or at its middle one where that is -1.
  std::int64_t steps(std::int64_t batch, std::int64_t initial) const;
  /// A round of such a batch; `mean_accepted` drafts a sequence, where any were drafted.
  void observe(std::int64_t batch, std::int64_t initial, double mean_accepted);

 private:
  struct State {
    Tier tier;
    bool started = false;
    std::size_t at = 0;  // the candidate
    double ema = 0.0;
    std::int64_t batches = 0;

    double value(std::size_t candidate) const {
      return static_cast<double>(tier.candidates[candidate]);
    }
    std::size_t first(std::int64_t initial) const;
    void move();
  };
  std::size_t tier_of(std::int64_t batch) const;

  std::vector<State> states_;
};

}  // namespace specrt
