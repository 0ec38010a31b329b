#include "specrt/planner.h"

#include <algorithm>
#include <numeric>

#include "specrt/error.h"

namespace specrt {
namespace {

struct Node {
  double gain = 0.0;
  std::size_t candidate = 0;
  std::int64_t place = 0;  // among the candidate's own
  std::int64_t depth = 0;
};

/// A choice that may turn out to be the best.
struct Found {
  double rate = 0.0;
  std::int64_t missed = 0;
  double tokens = 0.0;
  double seconds = 0.0;
  std::int64_t depth = 0;
  std::int64_t nodes = 0;

  bool better_than(const Found& other) const {
    return missed != other.missed ? missed < other.missed : rate > other.rate;
  }
};

class Search {
 public:
  Search(std::span<const DraftCandidate> candidates, const RoundCosts& costs, double other_tokens)
      : candidates_(candidates), costs_(costs), base_(other_tokens) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const DraftCandidate& one = candidates[i];
      base_ += one.tokens;
      targets_ = targets_ || one.pace_seconds > 0.0;
      for (std::size_t place = 0; place < one.gains.size(); ++place) {
        const auto depth =
            static_cast<std::int64_t>(static_cast<double>(place) / std::max(one.width, 1.0)) + 1;
        if (depth >= static_cast<std::int64_t>(costs.draft.size())) break;
        nodes_.push_back({one.gains[place], i, static_cast<std::int64_t>(place), depth});
        deepest_ = std::max(deepest_, depth);
      }
    }
    // Gains fall within a candidate, so that its nodes come in their own order.
    std::stable_sort(nodes_.begin(), nodes_.end(),
                     [](const Node& a, const Node& b) { return a.gain > b.gain; });
    targets_ = targets_ || costs.limit_seconds > 0.0;
    needed_.resize(candidates.size());
    if (!targets_) return;
    for (const DraftCandidate& one : candidates) {
      paces_.push_back(pace(one));
      std::vector<double>& tokens = tokens_.emplace_back();
      tokens.reserve(one.gains.size() + 1);
      tokens.push_back(one.tokens);
      for (const double gain : one.gains) tokens.push_back(tokens.back() + gain);
    }
  }

  Allocation best() {
    Found best = look(0, 0);
    const double plain = best.rate;
    for (std::int64_t depth = 1; depth <= deepest_; ++depth) {
      if (targets_) {
        sweep_targets(depth, plain, best);
      } else {
        sweep(depth, plain, best);
      }
    }
    Allocation out;
    out.nodes.resize(candidates_.size(), 0);
    out.tokens = best.tokens;
    out.seconds = best.seconds;
    out.missed = best.missed;
    if (best.nodes > 0) look(best.depth, best.nodes, &out.nodes);
    return out;
  }

 private:
  static void consider(const Found& found, double plain, Found& best) {
    // A draft that gains next to nothing is not worth its risk, unless a target asks for it.
    if (found.missed == best.missed && found.rate < kLeastGain * plain) return;
    if (found.better_than(best)) best = found;
  }

  // Without targets one pass over the nodes serves every total.
  void sweep(std::int64_t depth, double plain, Found& best) {
    double tokens = base_;
    double node_seconds = 0.0;
    std::int64_t n = 0;
    for (const Node& node : nodes_) {
      if (node.depth > depth) continue;
      if (++n >= std::ssize(costs_.pass)) return;
      tokens += node.gain;
      node_seconds += candidates_[node.candidate].node_seconds;
      const double seconds = seconds_of(depth, n) + node_seconds;
      consider({rate_of(tokens, seconds), 0, tokens, seconds, depth, n}, plain, best);
    }
  }

  // What targets need differs from total to total; most totals are seen to be worse without a look
  // at their nodes: as many of the highest gains would not make them the best.
  void sweep_targets(std::int64_t depth, double plain, Found& best) {
    double most_tokens = base_;
    auto node = nodes_.begin();
    for (std::int64_t n = 1; n < std::ssize(costs_.pass); ++n) {
      while (node != nodes_.end() && node->depth > depth) ++node;
      if (node != nodes_.end()) most_tokens += (node++)->gain;
      const double seconds = seconds_of(depth, n);
      constexpr double kRounding = 1.0 + 1e-9;
      const bool slower = rate_of(most_tokens, seconds) * kRounding <= best.rate;
      if (slower && best.missed == 0) continue;
      std::int64_t left = n;
      const std::int64_t missed = meet_targets(depth, seconds, left);
      if (missed > best.missed || (slower && missed == best.missed)) continue;
      consider(look(depth, n), plain, best);
    }
  }

  double seconds_of(std::int64_t depth, std::int64_t n) const {
    return costs_.pass[static_cast<std::size_t>(n)] + costs_.draft[static_cast<std::size_t>(depth)];
  }

  // Of its own time: prompts' rows are work of which no token here tells, and next to theirs any
  // draft would look cheap.
  double rate_of(double tokens, double seconds) const {
    return tokens / (seconds - costs_.aside_seconds);
  }

  // needed_ of a round of so many seconds, in their order as long as nodes are left, and how many
  // targets are missed.
  std::int64_t meet_targets(std::int64_t depth, double seconds, std::int64_t& left) {
    std::int64_t missed = costs_.limit_seconds > 0.0 && seconds > costs_.limit_seconds ? 1 : 0;
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      needed_[i] = needed(i, depth, seconds);
      if (needed_[i] > left) needed_[i] = kOutOfReach;
      if (needed_[i] == kOutOfReach) {
        ++missed;
        needed_[i] = 0;
      }
      left -= needed_[i];
    }
    return missed;
  }

  // The best of n nodes no deeper than `depth`: first what targets need, then what gains most.
  Found look(std::int64_t depth, std::int64_t n, std::vector<std::int64_t>* out = nullptr) {
    Found found;
    found.depth = depth;
    found.nodes = n;
    found.tokens = base_;
    found.seconds = seconds_of(depth, n);
    std::int64_t left = n;
    if (targets_) {
      found.missed = meet_targets(depth, found.seconds, left);
    } else {
      std::fill(needed_.begin(), needed_.end(), 0);
    }
    double node_seconds = 0.0;
    for (const Node& node : nodes_) {
      if (node.depth > depth) continue;
      const bool is_needed = node.place < needed_[node.candidate];
      if (!is_needed && left == 0) continue;
      left -= is_needed ? 0 : 1;
      found.tokens += node.gain;
      node_seconds += candidates_[node.candidate].node_seconds;
      if (out != nullptr) ++(*out)[node.candidate];
    }
    found.seconds += node_seconds;
    found.rate = rate_of(found.tokens, found.seconds);
    return found;
  }

  static constexpr std::int64_t kOutOfReach = -1;
  static constexpr double kLost = 1.1;       // costs are known no better than that
  static constexpr double kNearBest = 1.02;  // rounds of nearly the same length are good, too

  static std::int64_t most_nodes(const DraftCandidate& one, std::int64_t depth) {
    return std::min<std::int64_t>(
        std::ssize(one.gains),
        static_cast<std::int64_t>(static_cast<double>(depth) * std::max(one.width, 1.0)));
  }

  /// The pace to keep: its own, or the best there is where that is not much slower than hope.
  double pace(const DraftCandidate& one) const {
    if (one.pace_seconds <= 0.0 || one.hope_seconds <= 0.0) return one.pace_seconds;
    double best = 0.0;
    for (std::int64_t depth = 0; depth < std::ssize(costs_.draft); ++depth) {
      double tokens = one.tokens;
      const std::int64_t most = std::min(most_nodes(one, depth), std::ssize(costs_.pass) - 1);
      for (std::int64_t n = 0; n <= most; ++n) {
        if (n > 0) tokens += one.gains[static_cast<std::size_t>(n - 1)];
        const double seconds = seconds_of(depth, n) - costs_.aside_seconds;
        if (best == 0.0 || seconds < best * tokens) best = seconds / tokens;
      }
    }
    if (best > kLost * one.hope_seconds) return one.pace_seconds;
    return std::max(one.pace_seconds, kNearBest * best);
  }

  /// The fewest nodes with which a round of so many seconds keeps the candidate's pace.
  std::int64_t needed(std::size_t i, std::int64_t depth, double seconds) const {
    const DraftCandidate& one = candidates_[i];
    if (paces_[i] <= 0.0) return 0;
    const double wanted = (seconds - costs_.aside_seconds) / paces_[i];
    const std::vector<double>& tokens = tokens_[i];
    const auto end = tokens.begin() + most_nodes(one, depth) + 1;
    const auto enough = std::lower_bound(tokens.begin(), end, wanted);
    return enough == end ? kOutOfReach : enough - tokens.begin();
  }

  std::span<const DraftCandidate> candidates_;
  RoundCosts costs_;
  double base_ = 0.0;  // tokens without any draft
  bool targets_ = false;
  std::int64_t deepest_ = 0;
  std::vector<Node> nodes_;
  std::vector<std::int64_t> needed_;
  // By candidate, where there are targets:
  std::vector<double> paces_;
  std::vector<std::vector<double>> tokens_;  // with its first so many nodes
};

}  // namespace

Allocation allocate_drafts(std::span<const DraftCandidate> candidates, const RoundCosts& costs,
                           double other_tokens) {
  if (costs.pass.empty() || costs.draft.empty()) {
    throw InvalidArgument(
        "[costs] expected passes from 0 nodes and drafts from depth 0 on, got none");
  }
  return Search(candidates, costs, other_tokens).best();
}

double pace_of(double target, double elapsed, std::int64_t tokens, std::int64_t window) {
  if (!(target > 0.0)) return 0.0;
  const auto ahead = static_cast<double>(std::max<std::int64_t>(1, window));
  const double left = target * (static_cast<double>(tokens) + ahead) - elapsed;
  return std::clamp(left / ahead, target / 4.0, target * 4.0);
}

}  // namespace specrt
