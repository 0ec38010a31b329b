#include "reference/kernels.h"

#include <cmath>

namespace specrt::reference {

Vector gemm(const Vector& x, const Vector& weight, const Vector& bias, std::int64_t rows,
            std::int64_t n, std::int64_t k) {
  Vector y(static_cast<std::size_t>(rows * n));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0.0;
      for (std::int64_t j = 0; j < k; ++j) sum += x[r * k + j] * weight[i * k + j];
      y[r * n + i] = bias.empty() ? sum : sum + bias[i];
    }
  }
  return y;
}

Vector rms_norm(const Vector& x, const Vector& weight, double eps) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  const double root = std::sqrt(squares / static_cast<double>(x.size()) + eps);
  Vector out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] / root * weight[i];
  return out;
}

Vector rope(const Vector& x, const Vector& angles) {
  const std::size_t half = x.size() / 2;
  Vector out(x.size());
  for (std::size_t i = 0; i < half; ++i) {
    const double c = std::cos(angles[i]);
    const double s = std::sin(angles[i]);
    out[i] = x[i] * c - x[half + i] * s;
    out[half + i] = x[half + i] * c + x[i] * s;
  }
  return out;
}

Vector silu_mul(const Vector& gate, const Vector& up) {
  Vector out(gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    out[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
  }
  return out;
}

Vector gelu_mul(const Vector& gate, const Vector& up) {
  Vector out(gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double x = gate[i];
    const double u = std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    out[i] = 0.5 * x * (1.0 + std::tanh(u)) * up[i];
  }
  return out;
}

}  // namespace specrt::reference
