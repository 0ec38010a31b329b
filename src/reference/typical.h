#pragma once

// Typical acceptance as Medusa's authors write it, path by path in double precision: for tests
// only.

#include <functional>
#include <vector>

#include "reference/rejection.h"

namespace specrt::reference {

/// min(epsilon, delta * exp(-sum of -p log(p + 1e-5))).
double typical_bound(const Law& law, double epsilon, double delta);

/// The accepted nodes of a draft, root side first. `law(node)` is the target's behind a node, -1
/// the root. Every path to a leaf is accepted as far as each token is likelier than the bound where
/// it stands; the longest such beginning wins, then the one of the largest sum of
/// log-probabilities, then the first.
std::vector<int> typical_path(const std::vector<int>& tokens, const std::vector<int>& parents,
                              const std::function<Law(int node)>& law, double epsilon,
                              double delta);

}  // namespace specrt::reference
