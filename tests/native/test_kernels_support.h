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
using specrt::Precision;
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
  std::normal_distribution<float> normal;
  Floats out(n);
  for (float& value : out) value = scale * normal(engine);
  return out;
}

inline Floats rounded_to_bf16(Floats x) {
  for (float& value : x) value = specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value));
  return x;
}

inline constexpr Precision kPrecisions[] = {Precision::f32, Precision::bf16, Precision::int8,
                                            Precision::int4, Precision::w8a8};

/// What a product reads instead of x where the level prepares its input; empty elsewhere. Made in
/// two parts, as threads would.
inline std::vector<std::uint16_t> prepare(const Kernels& kernels, Precision precision,
                                          const specrt::cpu::GemmArgs& args) {
  std::vector<std::uint16_t> out;
  const auto body = precision == Precision::w8a8 ? kernels.prepare_w8a8 : kernels.prepare_bf16;
  if (precision == Precision::f32 || body == nullptr) return out;
  out.assign(static_cast<std::size_t>(specrt::cpu::prepared_bytes(args.rows, args.k) / 2), 0xFFFF);
  const std::int64_t padded = specrt::cpu::prepared_rows(args.rows);
  body(args.x, args.rows, args.x_stride, args.k, 0, padded / 2, out.data());
  body(args.x, args.rows, args.x_stride, args.k, padded / 2, padded, out.data());
  return out;
}

inline specrt::reference::Vector doubles(const Floats& x) { return {x.begin(), x.end()}; }

inline bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

}  // namespace kernel_test
