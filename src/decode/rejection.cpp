#include "decode/rejection.h"

#include <algorithm>

#include "core/philox.h"
#include "specrt/error.h"

namespace specrt {

double coin(const SamplingParams& params, std::int64_t position, std::uint32_t purpose,
            std::uint32_t which) {
  return uniform_from_bits(noise_bits(params.seed, params.sample_index,
                                      static_cast<std::uint32_t>(position), purpose, which));
}

namespace {

double sum_of(std::span<const float> values) {
  // Fixed chunks, as every vocabulary-wide sum.
  double total = 0.0;
  for (std::size_t begin = 0; begin < values.size(); begin += cpu::kVocabChunk) {
    const std::size_t end = std::min(values.size(), begin + cpu::kVocabChunk);
    double chunk = 0.0;
    for (std::size_t i = begin; i < end; ++i) chunk += double{values[i]};
    total += chunk;
  }
  return total;
}

std::span<const float> drawn_from(const DraftTree& tree, std::int32_t node, std::size_t vocab) {
  const std::span<const float> q = tree.distribution(node);
  if (q.size() > vocab || q.empty()) {
    throw InvalidArgument(
        expected_got("draft",
                     "the distribution that a sampled draft was drawn from, of at most " +
                         std::to_string(vocab) + " values",
                     std::to_string(q.size()) + " values"));
  }
  return q;
}

}  // namespace

Verdict reject_at_node(const Chooser& chooser, std::span<float> law, const DraftTree& tree,
                       std::int32_t node, const SamplingParams& params, std::int64_t position,
                       std::vector<float>& scratch) {
  const auto size = static_cast<std::int32_t>(tree.size());
  const bool sampled = tree.draw() != Draw::deterministic && tree.has_children(node);
  std::vector<float>& q = scratch;
  if (sampled) {
    const std::span<const float> given = drawn_from(tree, node, law.size());
    q.assign(law.size(), 0.0f);
    std::copy(given.begin(), given.end(), q.begin());
  }
  double p_mass = sum_of(law);
  double q_mass = sampled ? sum_of(q) : 1.0;
  std::uint32_t trial = 0;
  for (std::int32_t child = node + 1; child < size; ++child) {
    if (tree.parents()[static_cast<std::size_t>(child)] != node) continue;
    const TokenId token = tree.tokens()[static_cast<std::size_t>(child)];
    const auto id = static_cast<std::size_t>(token);
    const double u = coin(params, position, purpose_word(Purpose::accept), trial++);
    const bool possible = law[id] > 0.0f;
    if (!sampled) {
      // Accept with probability p(x); else x is out of the question.
      if (u * p_mass < double{law[id]}) return {token, child};
      law[id] = 0.0f;
    } else {
      // u < (p / p_mass) / (q / q_mass); strict, so that p = 0 is never accepted.
      if (u * double{q[id]} * p_mass < double{law[id]} * q_mass) return {token, child};
      // p <- norm(max(p - q, 0)), both normalised.
      for (std::size_t i = 0; i < law.size(); ++i) {
        const double left = double{law[i]} / p_mass - double{q[i]} / q_mass;
        law[i] = left > 0.0 ? static_cast<float>(left) : 0.0f;
      }
      if (tree.draw() == Draw::without_replacement) {
        q[id] = 0.0f;
        q_mass = sum_of(q);
      }
    }
    p_mass = sum_of(law);
    if (p_mass > 0.0) continue;
    // Rejecting where p and q agree has probability zero; rounding may get here all the same.
    if (possible) return {token, child};
    throw InternalError("[rejection] expected something left of the target's law, got nothing");
  }
  return {chooser.draw(law, params, position, purpose_word(Purpose::residual)), -1};
}

void BlockWalk::start(const DraftTree& chain) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (chain.parents()[i] != static_cast<std::int32_t>(i) - 1) {
      throw InvalidArgument(expected_got("block verification", "a chain", "a draft tree"));
    }
  }
  chain_ = &chain;
  length_ = static_cast<std::int32_t>(chain.size());
  next_ = 0;
  accepted_ = 0;
  joint_ = 1.0;
}

void BlockWalk::step(std::span<const float> law, const SamplingParams& params,
                     std::int64_t position) {
  const std::int32_t i = next_++;
  if (i == 0) round_start_ = position;
  const double p_mass = sum_of(law);
  const bool last = i == length_;
  // weights = max(joint * p - q, 0): what is drawn from if exactly i tokens are accepted.
  std::span<const float> q;
  TokenId picked = -1;
  if (!last) {
    picked = chain_->tokens()[static_cast<std::size_t>(i)];
    if (chain_->draw() != Draw::deterministic) q = drawn_from(*chain_, i - 1, law.size());
  }
  const double q_mass = q.empty() ? 1.0 : sum_of(q);
  const auto q_of = [&](std::size_t id) {
    if (!q.empty()) return id < q.size() ? double{q[id]} / q_mass : 0.0;
    return static_cast<TokenId>(id) == picked ? 1.0 : 0.0;
  };
  double excess = 0.0;
  if (!last) {
    for (std::size_t id = 0; id < law.size(); ++id) {
      const double left = joint_ * (double{law[id]} / p_mass) - q_of(id);
      if (left > 0.0) excess += left;
    }
  }
  bool accept = i == 0;  // accepting nothing is always possible
  if (i > 0) {
    const double chance = last ? joint_ : excess / (excess + 1.0 - joint_);
    // The coin of the i-th draft token, at that token's position.
    const double u = coin(params, position - 1, purpose_word(Purpose::accept, round_start_), 0);
    accept = u < chance || (last && joint_ >= 1.0);
  }
  if (accept) {
    accepted_ = i;
    residual_.resize(law.size());
    for (std::size_t id = 0; id < law.size(); ++id) {
      const double left = last ? double{law[id]} : joint_ * (double{law[id]} / p_mass) - q_of(id);
      residual_[id] = left > 0.0 ? static_cast<float>(left) : 0.0f;
    }
  }
  if (!last) {
    const auto id = static_cast<std::size_t>(picked);
    const double q_token = q_of(id);
    joint_ = q_token > 0.0 ? std::min(joint_ * (double{law[id]} / p_mass) / q_token, 1.0) : 0.0;
  }
}

}  // namespace specrt
