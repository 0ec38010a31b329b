#include "reference/rejection.h"

#include <algorithm>
#include <numeric>

namespace specrt::reference {
namespace {

double total(const Law& law) { return std::accumulate(law.begin(), law.end(), 0.0); }

void normalise(Law& law) {
  const double sum = total(law);
  if (sum > 0.0) {
    for (double& value : law) value /= sum;
  }
}

Text plus(Text text, int token) {
  text.push_back(token);
  return text;
}

// Every sequence of draws of a node's children with its probability.
void each_draw(const Law& q, Draw draw, int width, std::vector<int>& drawn, double probability,
               const std::function<void(const std::vector<int>&, double)>& use) {
  if (static_cast<int>(drawn.size()) == width || total(q) <= 0.0) {
    use(drawn, probability);
    return;
  }
  for (std::size_t x = 0; x < q.size(); ++x) {
    if (q[x] <= 0.0) continue;
    Law left = q;
    if (draw == Draw::without_replacement) {
      left[x] = 0.0;
      normalise(left);
    }
    drawn.push_back(static_cast<int>(x));
    each_draw(left, draw, width, drawn, probability * q[x], use);
    drawn.pop_back();
  }
}

// The `width` most likely tokens: what a drafter picks that does not sample.
std::vector<int> most_likely(const Law& q, int width) {
  std::vector<int> order(q.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return q[static_cast<std::size_t>(a)] > q[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(width)));
  return order;
}

void extend(const Model& model, const Text& text, int length, double probability,
            std::map<Text, double>& out) {
  if (probability == 0.0) return;
  if (static_cast<int>(text.size()) == length) {
    out[text] += probability;
    return;
  }
  const Law p = model(text);
  for (std::size_t x = 0; x < p.size(); ++x) {
    extend(model, plus(text, static_cast<int>(x)), length, probability * p[x], out);
  }
}

class Rejection {
 public:
  Rejection(const Model& target, const DraftPlan& plan, int length)
      : target_(target), plan_(plan), length_(length) {}

  // `level` levels of the tree have been walked.
  void node(const Text& text, int level, double probability) {
    if (probability == 0.0) return;
    if (static_cast<int>(text.size()) == length_) {
      out[text] += probability;
      return;
    }
    if (level == plan_.depth) {
      // The bonus token; the next round starts behind it and has, by induction, the right law.
      extend(target_, text, length_, probability, out);
      return;
    }
    const Law p = target_(text);
    const Law q = plan_.model(text);
    const auto walk = [&](const std::vector<int>& children, double draw_probability) {
      const NodeOutcome outcome = reject_at_node(p, q, children, plan_.draw);
      for (std::size_t i = 0; i < children.size(); ++i) {
        node(plus(text, children[i]), level + 1,
             probability * draw_probability * outcome.accepted[i]);
      }
      for (std::size_t x = 0; x < p.size(); ++x) {
        extend(target_, plus(text, static_cast<int>(x)), length_,
               probability * draw_probability * outcome.residual[x], out);
      }
    };
    if (plan_.draw == Draw::deterministic) {
      walk(most_likely(q, plan_.width), 1.0);
    } else {
      std::vector<int> drawn;
      each_draw(q, plan_.draw, plan_.width, drawn, 1.0, walk);
    }
  }

  std::map<Text, double> out;

 private:
  const Model& target_;
  const DraftPlan& plan_;
  int length_;
};

}  // namespace

NodeOutcome reject_at_node(Law p, Law q, const std::vector<int>& children, Draw draw) {
  NodeOutcome outcome;
  double reached = 1.0;  // probability that all children so far were rejected
  for (const int child : children) {
    const auto x = static_cast<std::size_t>(child);
    const double q_x = draw == Draw::deterministic ? 1.0 : q[x];
    const double accept = q_x > 0.0 ? std::min(1.0, p[x] / q_x) : 0.0;
    outcome.accepted.push_back(reached * accept);
    reached *= 1.0 - accept;
    if (draw == Draw::deterministic) {
      p[x] = 0.0;
      normalise(p);
      continue;
    }
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = std::max(p[i] - q[i], 0.0);
    normalise(p);
    if (draw == Draw::without_replacement) {
      q[x] = 0.0;
      normalise(q);
    }
  }
  outcome.residual = p;
  for (double& value : outcome.residual) value *= reached;
  return outcome;
}

std::map<Text, double> law_of_rejection(const Model& target, const DraftPlan& plan, int length) {
  Rejection rejection(target, plan, length);
  rejection.node({}, 0, 1.0);
  return rejection.out;
}

std::map<Text, double> law_of_block(const Model& target, const Model& draft, int gamma,
                                    int length) {
  std::map<Text, double> out;
  std::map<Text, double> chains;
  extend(draft, {}, gamma, 1.0, chains);
  for (const auto& [chain, chain_probability] : chains) {
    // Joint acceptance p_i and the chance h_i that a prefix of i tokens is kept, from the paper.
    std::vector<double> joint = {1.0};
    std::vector<double> chance = {1.0};
    std::vector<Law> residual;
    Text text;
    for (int i = 0; i <= gamma; ++i) {
      const Law p = target(text);
      Law left = p;
      double excess = 0.0;
      if (i < gamma) {
        const Law q = draft(text);
        for (std::size_t x = 0; x < p.size(); ++x) {
          left[x] = std::max(joint.back() * p[x] - q[x], 0.0);
        }
        excess = total(left);
      }
      if (i > 0) {
        const double rest = 1.0 - joint.back();
        chance.push_back(i == gamma          ? joint.back()
                         : excess + rest > 0 ? excess / (excess + rest)
                                             : 0.0);
      }
      normalise(left);
      residual.push_back(left);
      if (i < gamma) {
        const auto x = static_cast<std::size_t>(chain[static_cast<std::size_t>(i)]);
        joint.push_back(std::min(joint.back() * p[x] / draft(text)[x], 1.0));
        text.push_back(chain[static_cast<std::size_t>(i)]);
      }
    }
    // The longest prefix whose coin falls within its chance is kept.
    double later_failed = 1.0;
    for (int kept = gamma; kept >= 0; --kept) {
      const auto k = static_cast<std::size_t>(kept);
      const double probability = chain_probability * later_failed * chance[k];
      later_failed *= 1.0 - chance[k];
      const Text prefix(chain.begin(), chain.begin() + kept);
      for (std::size_t x = 0; x < residual[k].size(); ++x) {
        Text emitted = plus(prefix, static_cast<int>(x));
        if (static_cast<int>(emitted.size()) > length)
          emitted.resize(static_cast<std::size_t>(length));
        extend(target, emitted, length, probability * residual[k][x], out);
      }
    }
  }
  return out;
}

std::map<Text, double> law_of_model(const Model& model, int length) {
  std::map<Text, double> out;
  extend(model, {}, length, 1.0, out);
  return out;
}

}  // namespace specrt::reference
