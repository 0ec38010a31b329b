#include "reference/typical.h"

#include <algorithm>
#include <cmath>

namespace specrt::reference {

double typical_bound(const Law& law, double epsilon, double delta) {
  double entropy = 0.0;
  for (const double p : law) entropy -= p * std::log(p + 1e-5);
  return std::min(epsilon, delta * std::exp(-entropy));
}

std::vector<int> typical_path(const std::vector<int>& tokens, const std::vector<int>& parents,
                              const std::function<Law(int node)>& law, double epsilon,
                              double delta) {
  std::vector<int> best;
  double best_likelihood = 0.0;
  const int size = static_cast<int>(tokens.size());
  for (int leaf = 0; leaf < size; ++leaf) {
    if (std::find(parents.begin(), parents.end(), leaf) != parents.end()) continue;
    std::vector<int> path;
    for (int node = leaf; node >= 0; node = parents[static_cast<std::size_t>(node)]) {
      path.insert(path.begin(), node);
    }
    std::vector<int> accepted;
    double likelihood = 0.0;
    for (const int node : path) {
      const Law p = law(parents[static_cast<std::size_t>(node)]);
      const double own = p[static_cast<std::size_t>(tokens[static_cast<std::size_t>(node)])];
      if (own <= typical_bound(p, epsilon, delta)) break;
      accepted.push_back(node);
      likelihood += std::log(own);
    }
    const bool longer = accepted.size() > best.size();
    const bool likelier = accepted.size() == best.size() && likelihood > best_likelihood;
    if (longer || (likelier && !accepted.empty())) {
      best = accepted;
      best_likelihood = likelihood;
    }
  }
  return best;
}

}  // namespace specrt::reference
