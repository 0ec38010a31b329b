#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "specrt/cpu.h"
#include "specrt/export.h"

namespace specrt {

/// What a round costs on this machine, in seconds: a pass by its rows, sequences and context, and
/// drafting by steps and sequences. Starts as a guess or as what measure_cost() found, and follows
/// what passes turn out to take.
class SPECRT_API CostModel {
 public:
  /// Passes of that many rows take so long; between them it is a line, beyond the last one too.
  using Table = std::vector<std::pair<std::int64_t, double>>;

  /// Drafting `steps` tokens of depth for `sequences` sequences: call + steps * (step + sequences *
  /// sequence).
  struct Draft {
    double call = 0.0;
    double step = 0.0;
    double sequence = 0.0;
  };

  /// A guess by the instruction-set level, right up to a factor: the first pass seen sets that.
  explicit CostModel(CpuIsa isa = CpuIsa::scalar);

  /// Rows rising, seconds > 0. Made to rise where noise has them fall. `per_token` is for each
  /// token of context of each sequence, `per_sequence` for each sequence beyond the first. Throws
  /// InvalidArgument.
  void set_pass(Table table, double per_sequence, double per_token);
  void set_draft(const std::string& drafter, const Draft& draft);

  /// `context`: tokens of all sequences together.
  double pass_seconds(std::int64_t rows, std::int64_t sequences, std::int64_t context) const;
  /// `step_share` stands in for a drafter of which nothing is known: Drafter::step_cost().
  Draft draft_of(const std::string& drafter, double step_share) const;
  double draft_seconds(const std::string& drafter, double step_share, std::int64_t steps,
                       std::int64_t sequences) const;

  /// What a pass took. One outlier changes little: what is seen counts for at most e^kMostSeen.
  void observe_pass(std::int64_t rows, std::int64_t sequences, std::int64_t context,
                    double seconds);
  void observe_draft(const std::string& drafter, double step_share, std::int64_t steps,
                     std::int64_t sequences, double seconds);

  bool measured() const { return measured_; }
  const Table& table() const { return table_; }
  double per_sequence() const { return per_sequence_; }
  double per_token() const { return per_token_; }
  const std::map<std::string, Draft>& drafts() const { return drafts_; }
  double scale() const { return scale_; }  ///< of all passes, as last seen

  /// As text, for a file; parse() throws InvalidArgument for anything else.
  std::string text() const;
  static CostModel parse(const std::string& text);

  static constexpr double kMostSeen = 0.5;  ///< of a logarithm
  static constexpr double kScaleRate = 0.15;
  static constexpr double kShapeRate = 0.05;

 private:
  Table table_;
  double per_sequence_ = 0.0;
  double per_token_ = 0.0;
  double scale_ = 1.0;
  bool measured_ = false;
  bool seen_ = false;
  std::map<std::string, Draft> drafts_;
};

/// What one sequence could draft.
struct DraftCandidate {
  /// Tokens that its first, second, ... node is expected to add; none more than the one before.
  std::span<const double> gains;
  double width = 1.0;         ///< nodes a depth: node i (from 0) has depth i / width + 1
  double node_seconds = 0.0;  ///< of drafting one more node for it
  double pace_seconds = 0.0;  ///< what a token of it may take; 0: anything
  /// What each of all its tokens to come may take for its target to be met in the end. While that
  /// can be had and the pace cannot, the best that can be had is the pace. 0: the pace is as it is.
  double hope_seconds = 0.0;
  double tokens = 1.0;  ///< expected without any of these nodes
};

/// What a round costs by what is drafted in it.
struct RoundCosts {
  std::span<const double> pass;   ///< [n]: the pass with n draft nodes in all; the last is the most
  std::span<const double> draft;  ///< [d]: drafting to depth d, but for node_seconds; [0]: others'
  double limit_seconds = 0.0;     ///< what the round may take; 0: anything
  double aside_seconds = 0.0;     ///< of every pass, that count for no pace and no rate
};

struct Allocation {
  std::vector<std::int64_t> nodes;  ///< by candidate
  double tokens = 0.0;              ///< expected of the round, the target's own included
  double seconds = 0.0;             ///< expected to take
  std::int64_t missed = 0;          ///< targets that cannot be met, candidates' and the limit
};

/// The one choice for all candidates that yields the most tokens a second, among those that miss
/// the fewest targets: for every depth and every number of nodes, first what targets need, then
/// what gains most; of all these the best. A cost that is a staircase has no slope to climb, so all
/// are looked at. `other_tokens` come from sequences that are no candidates. Drafts have to gain
/// kLeastGain over none.
SPECRT_API Allocation allocate_drafts(std::span<const DraftCandidate> candidates,
                                      const RoundCosts& costs, double other_tokens);
inline constexpr double kLeastGain = 1.01;

/// Seconds that each of the next `window` tokens of a sequence may take for its mean time per token
/// to be at `target` behind them, of `tokens` after the first in `elapsed` seconds; within a factor
/// of 4 of the target.
SPECRT_API double pace_of(double target, double elapsed, std::int64_t tokens,
                          std::int64_t window = 16);

}  // namespace specrt
