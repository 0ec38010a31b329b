#include <algorithm>
#include <cmath>

#include "reference/kernels.h"

namespace specrt::reference {

Vector attention(const Vector& q, const std::vector<Vector>& keys,
                 const std::vector<Vector>& values, double scale, double softcap,
                 std::int64_t window) {
  const std::size_t n = keys.size();
  const auto seen = static_cast<std::size_t>(window);
  const std::size_t first = window > 0 && n > seen ? n - seen : 0;
  Vector scores;
  for (std::size_t j = first; j < n; ++j) {
    double dot = 0.0;
    for (std::size_t d = 0; d < q.size(); ++d) dot += q[d] * keys[j][d];
    const double score = scale * dot;
    scores.push_back(softcap > 0.0 ? softcap * std::tanh(score / softcap) : score);
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  const Vector weights = normalized(exp_weights(scores, top, 1.0));
  Vector out(values[0].size(), 0.0);
  for (std::size_t j = first; j < n; ++j) {
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weights[j - first] * values[j][d];
  }
  return out;
}

Vector quantised(const Vector& x) {
  double most = 0.0;
  for (const double value : x) most = std::max(most, std::abs(value));
  Vector out(x.size(), 0.0);
  if (most == 0.0) return out;
  for (std::size_t i = 0; i < x.size(); ++i) {
    out[i] = most / 127.0 * std::nearbyint(x[i] * 127.0 / most);
  }
  return out;
}

}  // namespace specrt::reference
