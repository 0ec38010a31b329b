#pragma once

// What the kernel tests share: every available level, and repeatable inputs.

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "reference/kernels.h"

namespace kernel_test {

using specrt::DType;
using specrt::cpu::Kernels;
using Floats = std::vector<float>;

/// Runs `body(table)` for every level of this machine, in the kernels' floating-point mode; a
/// failure names the level.
template <typename Body>
void on_every_isa(const Body& body) {
  const specrt::cpu::FpMode mode;
  for (const specrt::CpuIsa isa : specrt::available_cpu_isas()) {
    try {
      body(specrt::cpu::kernels_of(isa));
    } catch (const check::Failure& failure) {
      throw check::Failure(std::string(specrt::name_of(isa)) + ": " + failure.what());
    }
  }
}

inline Floats random_floats(std::size_t n, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats out(n);
  for (float& value : out) value = normal(engine);
  return out;
}

inline Floats rounded_to_bf16(Floats x) {
  for (float& value : x) value = specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value));
  return x;
}

inline specrt::reference::Vector doubles(const Floats& x) { return {x.begin(), x.end()}; }

inline bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

}  // namespace kernel_test
