#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"
#include "core/philox.h"
#include "cpu/dispatch.h"
#include "decode/choose.h"
#include "decode/rejection.h"
#include "reference/rejection.h"

// Rejection sampling keeps the target's law. First for the reference, exactly, by going through
// every draw and coin; then for the kernels, whose joint law over many seeds is tested against it.

namespace {

using specrt::DraftTree;
using specrt::Draw;
using specrt::reference::Law;
using specrt::reference::law_of_block;
using specrt::reference::law_of_model;
using specrt::reference::law_of_rejection;
using specrt::reference::Text;

// A law that differs from text to text; some tokens impossible where `zeros`.
Law law_after(const Text& text, int vocab, std::uint32_t seed, bool zeros) {
  std::uint32_t state = seed;
  for (const int token : text) state = state * 31 + static_cast<std::uint32_t>(token) + 1;
  Law law;
  double sum = 0.0;
  for (int x = 0; x < vocab; ++x) {
    const std::uint32_t bits = specrt::noise_bits(seed, 7, state, 9, static_cast<std::uint32_t>(x));
    double value = specrt::uniform_from_bits(bits);
    value = zeros && bits % 4 == 0 ? 0.0 : value * value + 1e-3;
    law.push_back(value);
    sum += value;
  }
  if (sum == 0.0) {
    law[0] = sum = 1.0;
  }
  for (double& value : law) value /= sum;
  return law;
}

specrt::reference::Model model(int vocab, std::uint32_t seed, bool zeros = false) {
  return [=](const Text& text) { return law_after(text, vocab, seed, zeros); };
}

double largest_difference(const std::map<Text, double>& a, const std::map<Text, double>& b) {
  double worst = 0.0;
  for (const auto& [text, probability] : a) {
    const auto found = b.find(text);
    worst = std::max(worst, std::fabs(probability - (found == b.end() ? 0.0 : found->second)));
  }
  for (const auto& [text, probability] : b) {
    if (a.find(text) == a.end()) worst = std::max(worst, probability);
  }
  return worst;
}

constexpr Draw kDraws[] = {Draw::deterministic, Draw::without_replacement, Draw::with_replacement};

}  // namespace

TEST(rejection_reference_is_exact) {
  for (const bool zeros : {false, true}) {
    for (const Draw draw : kDraws) {
      for (const auto& [vocab, width, depth] :
           {std::tuple{2, 1, 3}, {3, 2, 2}, {4, 3, 2}, {5, 1, 3}, {6, 2, 1}, {3, 2, 3}}) {
        const auto target = model(vocab, 1, zeros);
        const specrt::reference::DraftPlan plan{model(vocab, 2, zeros), draw, width, depth};
        const auto emitted = law_of_rejection(target, plan, 3);
        CHECK(largest_difference(emitted, law_of_model(target, 3)) < 1e-12);
      }
    }
  }
}

TEST(block_reference_is_exact) {
  for (const bool zeros : {false, true}) {
    for (const auto& [vocab, gamma] : {std::pair{2, 1}, {3, 2}, {4, 3}, {6, 2}, {3, 3}}) {
      const auto target = model(vocab, 3, zeros);
      const auto emitted = law_of_block(target, model(vocab, 4), gamma, gamma + 1);
      CHECK(largest_difference(emitted, law_of_model(target, gamma + 1)) < 1e-12);
    }
  }
}

namespace {

std::vector<float> floats(const Law& law) { return {law.begin(), law.end()}; }

int sample(const Law& law, std::mt19937_64& random) {
  return std::discrete_distribution<int>(law.begin(), law.end())(random);
}

// A draft tree drawn as the plan says, its distributions beside it.
DraftTree draft(const specrt::reference::DraftPlan& plan, const Text& text,
                std::mt19937_64& random) {
  DraftTree tree;
  tree.set_draw(plan.draw);
  struct Open {
    std::int32_t node;
    Text text;
    int level;
  };
  std::vector<Open> open = {{DraftTree::kRoot, text, 0}};
  while (!open.empty()) {
    const Open here = open.back();
    open.pop_back();
    if (here.level == plan.depth) continue;
    const Law q = plan.model(here.text);
    Law left = q;
    std::vector<std::int32_t> children;
    std::vector<int> tokens;
    for (int i = 0; i < plan.width; ++i) {
      double mass = 0.0;
      for (const double value : left) mass += value;
      if (mass <= 0.0) break;
      int token = 0;
      if (plan.draw == Draw::deterministic) {
        token = static_cast<int>(std::max_element(left.begin(), left.end()) - left.begin());
      } else {
        token = sample(left, random);
      }
      if (plan.draw != Draw::with_replacement) left[static_cast<std::size_t>(token)] = 0.0;
      children.push_back(tree.add(token, here.node));
      tokens.push_back(token);
    }
    if (plan.draw != Draw::deterministic) tree.set_distribution(here.node, floats(q));
    for (std::size_t i = 0; i < children.size(); ++i) {
      const bool repeated =
          std::find(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens[i]) !=
          tokens.begin() + static_cast<std::ptrdiff_t>(i);
      if (repeated) continue;  // its first twin has the subtree
      Text next = here.text;
      next.push_back(tokens[i]);
      open.push_back({children[i], next, here.level + 1});
    }
  }
  return tree;
}

constexpr int kVocab = 5;
constexpr int kLength = 3;

// p-value-free: the statistic against its mean and spread under the exact law.
void check_law(const std::map<Text, std::int64_t>& counts, const std::map<Text, double>& law,
               std::int64_t draws) {
  double statistic = 0.0;
  double degrees = -1.0;
  for (const auto& [text, probability] : law) {
    const double expected = probability * static_cast<double>(draws);
    const auto found = counts.find(text);
    const double seen = found == counts.end() ? 0.0 : static_cast<double>(found->second);
    if (expected < 1e-9) {
      CHECK_EQ(seen, 0.0);
      continue;
    }
    degrees += 1.0;
    if (seen > 0.0) statistic += 2.0 * seen * std::log(seen / expected);
  }
  // G is close to chi-square: mean `degrees`, variance 2 * degrees. Five sigma at a fixed seed.
  CHECK(statistic < degrees + 5.0 * std::sqrt(2.0 * degrees));
}

std::int64_t draw_count() {
#if defined(SPECRT_TESTS_THINNED)
  return 5000;
#else
  return 200000;
#endif
}

specrt::SamplingParams params_of(std::uint64_t seed, specrt::Verification verification) {
  specrt::SamplingParams params;
  params.temperature = 1.0;
  params.seed = seed;
  params.verification = verification;
  return params;
}

}  // namespace

TEST(rejection_keeps_the_law) {
  const specrt::cpu::Kernels& kernels = specrt::cpu::kernels_of(specrt::best_cpu_isa());
  const specrt::Chooser chooser(kernels, kVocab);
  const auto target = model(kVocab, 11, true);
  const auto law = law_of_model(target, kLength);
  std::vector<float> scratch;
  for (const Draw draw : kDraws) {
    for (const int width : {1, 3}) {
      const specrt::reference::DraftPlan plan{model(kVocab, 12), draw, width, 2};
      std::mt19937_64 random(99);
      std::map<Text, std::int64_t> counts;
      std::int64_t accepted = 0;
      for (std::int64_t i = 0; i < draw_count(); ++i) {
        const auto params =
            params_of(static_cast<std::uint64_t>(i), specrt::Verification::rejection);
        Text text;
        while (static_cast<int>(text.size()) < kLength) {
          const DraftTree tree = draft(plan, text, random);
          std::int32_t node = DraftTree::kRoot;
          for (bool on = true; on && static_cast<int>(text.size()) < kLength;) {
            std::vector<float> p = floats(target(text));
            const specrt::Verdict verdict = reject_at_node(
                chooser, p, tree, node, params, static_cast<std::int64_t>(text.size()), scratch);
            text.push_back(verdict.token);
            on = verdict.child >= 0;
            node = verdict.child;
            accepted += on ? 1 : 0;
          }
        }
        ++counts[text];
      }
      CHECK(accepted > draw_count() / 10);
      check_law(counts, law, draw_count());
    }
  }
}

TEST(block_verification_keeps_the_law_and_accepts_more) {
  const specrt::cpu::Kernels& kernels = specrt::cpu::kernels_of(specrt::best_cpu_isa());
  const specrt::Chooser chooser(kernels, kVocab);
  const auto target = model(kVocab, 21, true);
  const auto law = law_of_model(target, kLength);
  const specrt::reference::DraftPlan plan{model(kVocab, 22), Draw::without_replacement, 1, 2};
  std::mt19937_64 random(5);
  std::map<Text, std::int64_t> counts;
  std::int64_t by_block = 0;
  std::int64_t one_by_one = 0;
  std::vector<float> scratch;
  for (std::int64_t i = 0; i < draw_count(); ++i) {
    const auto params = params_of(static_cast<std::uint64_t>(i), specrt::Verification::block);
    Text text;
    while (static_cast<int>(text.size()) < kLength) {
      const DraftTree chain = draft(plan, text, random);
      const auto start = static_cast<std::int64_t>(text.size());
      specrt::BlockWalk walk;
      walk.start(chain);
      Text shown = text;
      while (walk.running()) {
        const auto position = static_cast<std::int64_t>(shown.size());
        walk.step(floats(target(shown)), params, position);
        if (walk.running()) shown.push_back(chain.tokens()[static_cast<std::size_t>(walk.node())]);
      }
      for (std::int32_t k = 0; k < walk.accepted(); ++k) {
        text.push_back(chain.tokens()[static_cast<std::size_t>(k)]);
      }
      text.push_back(chooser.draw(walk.residual(), params, start + walk.accepted(),
                                  specrt::purpose_word(specrt::Purpose::residual)));
      if (start == 0) {
        by_block += walk.accepted();
        std::int32_t node = DraftTree::kRoot;
        Text alone;
        for (;;) {
          std::vector<float> p = floats(target(alone));
          const auto verdict = reject_at_node(chooser, p, chain, node, params,
                                              static_cast<std::int64_t>(alone.size()), scratch);
          if (verdict.child < 0) break;
          alone.push_back(verdict.token);
          node = verdict.child;
          ++one_by_one;
        }
      }
    }
    text.resize(kLength);
    ++counts[text];
  }
  check_law(counts, law, draw_count());
  CHECK(by_block >= one_by_one);
}

TEST(impossible_tokens_are_never_accepted) {
  // The smallest coin there is, against p = 0: strictly less is needed.
  const specrt::cpu::Kernels& kernels = specrt::cpu::kernels_of(specrt::best_cpu_isa());
  const specrt::Chooser chooser(kernels, 3);
  std::vector<float> scratch;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const auto params = params_of(seed, specrt::Verification::rejection);
    for (const Draw draw : kDraws) {
      DraftTree tree;
      tree.set_draw(draw);
      tree.add(2, DraftTree::kRoot);
      const std::vector<float> q = {0.2f, 0.2f, 0.6f};
      if (draw != Draw::deterministic) tree.set_distribution(DraftTree::kRoot, q);
      std::vector<float> p = {0.5f, 0.5f, 0.0f};
      const auto verdict = reject_at_node(chooser, p, tree, DraftTree::kRoot, params, 0, scratch);
      CHECK_EQ(verdict.child, -1);
      CHECK(verdict.token != 2);
    }
  }
}
