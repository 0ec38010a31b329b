#pragma once

#include <array>
#include <cstdint>

namespace specrt {

/// A running mean that starts at a guess: an average of the guess and what came first, later with
/// exponentially fading weights.
class RunningMean {
 public:
  static constexpr double kGuessWeight = 2.0;  ///< what came first, counted in observations
  static constexpr double kLeast = 0.1;        ///< of the newest observation's weight

  explicit RunningMean(double guess = 1.0, double least = kLeast) : value_(guess), least_(least) {}
  void observe(double x);
  double value() const { return value_; }
  std::int64_t count() const { return count_; }

 private:
  double value_;
  double least_;
  std::int64_t count_ = 0;
};

/// How one source's drafts fared in one sequence: α_d, the share of its drafts accepted at depth d
/// among those that were decided there, which is after everything above was accepted. Depends on
/// nothing but what it was told, in order. Depths never decided are taken to be as the one above.
class Acceptance {
 public:
  static constexpr std::int64_t kDepths = 32;  ///< deeper ones count as the last

  explicit Acceptance(double guess = 1.0, double least = RunningMean::kLeast)
      : guess_(guess), least_(least) {}

  /// What is known here, as another's guess: it weighs little and is soon overruled.
  Acceptance as_guess() const;

  /// `accepted` >= 0 nodes of a path were; `rejected`: what the draft held next was not.
  void observe(std::int64_t accepted, bool rejected);
  /// All of a draft was accepted whose next node had been left out, though it was this likely.
  void observe_cut(std::int64_t accepted, double next);

  double alpha(std::int64_t depth) const;  ///< depth >= 1
  /// Expected accepted tokens of a draft of that depth: Σ over d of α_1 ⋯ α_d.
  double expected(std::int64_t depth) const;

 private:
  void learn(std::int64_t accepted, std::int64_t decided, double next);

  double guess_;
  double least_;            // of the newest observation's weight
  std::int64_t known_ = 0;  // depths that were ever decided
  std::array<RunningMean, kDepths> at_;
};

/// Which acceptance a source's confidence stands for: a drafter's probability is none of its being
/// right. Confidences are kept in classes; a class that has seen little follows `alpha`, the
/// acceptance at that depth whatever the confidence.
class Calibration {
 public:
  static constexpr std::int64_t kClasses = 8;
  static constexpr double kPriorWeight = 4.0;  ///< of `alpha`, in observations
  static constexpr double kFade = 0.95;        ///< of what a class has seen, per observation

  static std::int64_t class_of(double confidence);
  void observe(double confidence, bool accepted);
  double acceptance(double confidence, double alpha) const;

 private:
  struct Class {
    double seen = 0.0;
    double accepted = 0.0;
  };
  std::array<Class, kClasses> classes_;
};

/// What drafts cost, as shares of a target pass of one row.
struct DraftCost {
  double row = 0.0;   ///< verifying one more node
  double step = 0.0;  ///< drafting one more token of depth
};

/// Keeps a sequence from being slowed down by drafts that fail. Until the first does, all that is
/// asked for is drafted. Then fewer nodes where acceptance falls,
/// none where even one would not pay, then probes of depth one that grow rarer. The first accepted
/// probe is followed by another at once. Depends on the sequence's own rounds alone, so the batch
/// has no say in what is drafted.
class Brake {
 public:
  static constexpr std::int64_t kFirstPause = 8;  ///< rounds without a draft before a probe
  static constexpr std::int64_t kLongestPause = 128;
  static constexpr double kPausePerCost = 3.0;  ///< pauses longer by this, times what a probe costs
  static constexpr double kNearBest = 0.95;     ///< the longest draft of nearly the best speed

  /// How many of `most` draft nodes to ask for.
  std::int64_t limit(std::int64_t most, const DraftCost& cost) const;

  /// A round: its draft's nodes and depth, and what became of it. `counts` is false where a limit
  /// or a stop cut it short, so that it says nothing of the drafter.
  void observe(std::int64_t nodes, std::int64_t depth, std::int64_t accepted, bool rejected,
               bool counts);

  const Acceptance& acceptance() const { return acceptance_; }
  double width() const { return width_.value(); }  ///< nodes a depth
  /// For those who ask for no draft by other reasons: whether a probe is due that costs so much.
  bool probe_due(const DraftCost& cost) const;

 private:
  bool waited(std::int64_t pause, const DraftCost& cost) const;
  std::int64_t depth_for(std::int64_t most_depth, const DraftCost& cost) const;

  Acceptance acceptance_;
  RunningMean width_{1.0};  // nodes a depth
  bool failed_ = false;     // a draft was rejected
  std::int64_t idle_ = 0;   // rounds since the last draft
  std::int64_t pause_ = 0;  // rounds to wait for a probe once nothing pays
};

}  // namespace specrt
