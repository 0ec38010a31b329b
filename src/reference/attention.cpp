#include <algorithm>
#include <cmath>

#include "reference/kernels.h"

namespace specrt::reference {

Vector attention(const Vector& q, const std::vector<Vector>& keys,
                 const std::vector<Vector>& values, double scale) {
  Vector scores;
  for (const Vector& key : keys) {
    double dot = 0.0;
    for (std::size_t d = 0; d < q.size(); ++d) dot += q[d] * key[d];
    scores.push_back(scale * dot);
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  const Vector weights = normalized(exp_weights(scores, top, 1.0));
  Vector out(values[0].size(), 0.0);
  for (std::size_t j = 0; j < values.size(); ++j) {
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weights[j] * values[j][d];
  }
  return out;
}

}  // namespace specrt::reference
