#pragma once

// What the kernel tests share: every available level, and repeatable inputs.

#include <cstdint>
#include <cstring>
#include <limits>
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
  const auto isas = specrt::available_cpu_isas();
  if (std::find(isas.begin(), isas.end(), specrt::CpuIsa::avx512) != isas.end()) {
    // As machines have it that lack VNNI.
    body(*specrt::cpu::avx512_kernels());
  }
  for (const specrt::CpuIsa isa : isas) {
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
  const auto body = kernels.prepare[static_cast<int>(precision)];
  if (body == nullptr) return out;
  out.assign(static_cast<std::size_t>(specrt::cpu::prepared_bytes(args.rows, args.k) / 2), 0xFFFF);
  const std::int64_t padded = specrt::cpu::prepared_rows(args.rows);
  body(args.x, args.rows, args.x_stride, args.k, 0, padded / 2, out.data());
  body(args.x, args.rows, args.x_stride, args.k, padded / 2, padded, out.data());
  return out;
}

/// Keys and values as a KV cache holds them; slots that were never set read as NaN.
class KvMemory {
 public:
  KvMemory(const Kernels& kernels, specrt::KvDType dtype, std::int64_t slots, std::int64_t heads,
           std::int64_t dim)
      : kernels_(kernels), dtype_(dtype), heads_(heads), dim_(dim) {
    const auto bytes = static_cast<std::size_t>(slots * heads * dim) * specrt::size_of(dtype);
    k_.resize(bytes);
    v_.resize(bytes);
    k_scales_.resize(static_cast<std::size_t>(slots * heads));
    v_scales_.resize(k_scales_.size());
    const Floats poison(static_cast<std::size_t>(heads * dim),
                        std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t slot = 0; slot < slots; ++slot) set(slot, poison.data(), poison.data());
  }
  void set(std::int64_t slot, const float* key, const float* value) {
    const auto at = static_cast<std::size_t>(slot * heads_ * dim_) * specrt::size_of(dtype_);
    kernels_.store_kv(key, heads_, dim_, dtype_, k_.data() + at, k_scales_.data() + slot * heads_);
    kernels_.store_kv(value, heads_, dim_, dtype_, v_.data() + at,
                      v_scales_.data() + slot * heads_);
  }
  specrt::cpu::AttentionArgs args() const {
    specrt::cpu::AttentionArgs args;
    args.k = k_.data();
    args.v = v_.data();
    args.k_scales = dtype_ == specrt::KvDType::i8 ? k_scales_.data() : nullptr;
    args.v_scales = dtype_ == specrt::KvDType::i8 ? v_scales_.data() : nullptr;
    args.kv_dtype = dtype_;
    args.kv_heads = heads_;
    args.head_dim = dim_;
    return args;
  }

 private:
  const Kernels& kernels_;
  specrt::KvDType dtype_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::vector<std::byte> k_, v_;
  Floats k_scales_, v_scales_;
};

/// One head's vector as the cache gives it back.
inline specrt::reference::Vector as_stored(const Kernels& kernels, specrt::KvDType dtype,
                                           const float* x, std::int64_t dim) {
  specrt::reference::Vector out;
  if (dtype == specrt::KvDType::i8) {
    std::vector<std::int8_t> whole(static_cast<std::size_t>(dim));
    float scale = 0.0f;
    kernels.store_kv(x, 1, dim, dtype, whole.data(), &scale);
    for (const std::int8_t value : whole) out.push_back(static_cast<double>(scale) * value);
    return out;
  }
  const bool bf16 = dtype == specrt::KvDType::bf16;
  for (std::int64_t i = 0; i < dim; ++i) {
    out.push_back(bf16 ? specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(x[i])) : x[i]);
  }
  return out;
}

inline specrt::reference::Vector doubles(const Floats& x) { return {x.begin(), x.end()}; }

inline bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

}  // namespace kernel_test
