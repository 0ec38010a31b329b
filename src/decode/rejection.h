#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decode/choose.h"
#include "specrt/draft_tree.h"
#include "specrt/sampling.h"

namespace specrt {

/// A uniform number in (0, 1): the `which`-th of a purpose_word() at `position`.
double coin(const SamplingParams& params, std::int64_t position, std::uint32_t purpose,
            std::uint32_t which);

/// What `rejection` verification decided at one node.
struct Verdict {
  TokenId token = 0;
  std::int32_t child = -1;  ///< the accepted child, or -1: the token is the residual's or the bonus
};

/// One node of multi-round rejection (Leviathan et al. 2211.17192; SpecInfer 2305.09781; without
/// replacement as in EAGLE 2401.15077): children in draw order, each accepted with probability
/// min(1, p / q) against what the rejections before left of p. `law` is the target's distribution
/// at the node and is consumed. `position` is the absolute index of the token that is decided.
/// Coins and the residual's draw come from streams of their own, keyed by position. `scratch`
/// saves an allocation.
Verdict reject_at_node(const Chooser& chooser, std::span<float> law, const DraftTree& tree,
                       std::int32_t node, const SamplingParams& params, std::int64_t position,
                       std::vector<float>& scratch);

/// Block verification of a chain (Sun et al. 2403.10444): accepts by the joint probability of
/// prefixes, never fewer tokens in expectation than one by one. Nodes are shown in order; the
/// result stands after the last.
class BlockWalk {
 public:
  void start(const DraftTree& chain);
  bool running() const { return next_ <= length_; }
  /// The node whose law is wanted next.
  std::int32_t node() const { return next_ - 1; }
  /// The target's law at node(); `position` is that of the token behind it.
  void step(std::span<const float> law, const SamplingParams& params, std::int64_t position);
  /// How many draft tokens are accepted, and the weights that the next token is drawn from.
  std::int32_t accepted() const { return accepted_; }
  std::span<const float> residual() const { return residual_; }

 private:
  const DraftTree* chain_ = nullptr;
  std::int32_t length_ = 0;
  std::int32_t next_ = 0;
  std::int32_t accepted_ = 0;
  std::int64_t round_start_ = 0;  // position of the first drafted token
  double joint_ = 1.0;            // p_i of the paper
  std::vector<float> residual_;
};

}  // namespace specrt
