#pragma once

// Every kernel as its definition says it, in double precision: slow, obvious, for tests only.

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace specrt::reference {

using Vector = std::vector<double>;

/// y[r][n] = sum over k of x[r][k] * weight[n][k], plus bias[n] where there is one.
Vector gemm(const Vector& x, const Vector& weight, const Vector& bias, std::int64_t rows,
            std::int64_t n, std::int64_t k);

/// x / sqrt(mean(x^2) + eps) * weight, of one row.
Vector rms_norm(const Vector& x, const Vector& weight, double eps);

/// One head rotated by angles[i] in the pairs (i, i + head_dim / 2).
Vector rope(const Vector& x, const Vector& angles);

/// silu(gate) * up, or gelu's tanh form of the gate
Vector silu_mul(const Vector& gate, const Vector& up);
Vector gelu_mul(const Vector& gate, const Vector& up);

/// softmax(scale * q . keys) . values for one query head; keys[j] and values[j] are the vectors at
/// position j. softcap > 0: scores are softcap * tanh(score / softcap); window > 0: of the last
/// `window` positions only.
Vector attention(const Vector& q, const std::vector<Vector>& keys,
                 const std::vector<Vector>& values, double scale, double softcap = 0.0,
                 std::int64_t window = 0);

/// x as an int8 KV cache gives it back: max |x| / 127 times the nearest whole numbers.
Vector quantised(const Vector& x);

/// exp((x[i] - max) * inv_temperature)
Vector exp_weights(const Vector& x, double max, double inv_temperature);

/// x / sum(x)
Vector normalized(const Vector& x);

/// The race of cpu::Kernels::race, run over every entry.
cpu::Race race(const std::vector<float>& weights, const std::vector<std::int32_t>& ids,
               const cpu::NoiseKey& key);

}  // namespace specrt::reference
