#pragma once

// Speculative sampling as the papers write it, in double precision, and the exact law of what it
// emits: for tests only.

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "specrt/draft_tree.h"

namespace specrt::reference {

using Law = std::vector<double>;
using Text = std::vector<int>;
/// The next token's law, given what came before.
using Model = std::function<Law(const Text&)>;

/// What multi-round rejection does at one node: with which probability each child is accepted, and
/// with which each token is emitted otherwise.
struct NodeOutcome {
  std::vector<double> accepted;  ///< a child each
  Law residual;                  ///< sums to 1 - sum(accepted)
};

/// for child x in draw order:
///   accept with probability min(1, p[x] / q[x])
///   else p = norm(max(p - q, 0)); without replacement q[x] = 0, q = norm(q)
/// A deterministic child is accepted with probability p[x], else p[x] = 0, p = norm(p).
NodeOutcome reject_at_node(Law p, Law q, const std::vector<int>& children, Draw draw);

/// How a draft tree comes about: `width` children a node, `depth` levels, drawn from `model`.
struct DraftPlan {
  Model model;
  Draw draw = Draw::without_replacement;
  int width = 1;
  int depth = 1;
};

/// Probability of every text of `length` tokens that rejection over such drafts emits, all draws
/// and coins taken together. By the theorem it is the target's own.
std::map<Text, double> law_of_rejection(const Model& target, const DraftPlan& plan, int length);

/// The same for block verification of chains of `gamma` tokens.
std::map<Text, double> law_of_block(const Model& target, const Model& draft, int gamma, int length);

/// Probability of every text of `length` tokens under the model itself.
std::map<Text, double> law_of_model(const Model& model, int length);

}  // namespace specrt::reference
