#pragma once

// Weights as the device has them, and activations for them.

#include "cpu/pack.h"
#include "cpu/quantise.h"
#include "kernels/gemm.h"
#include "kernels/pack.h"
#include "support.h"

namespace cuda_test {

using specrt::cuda::pack_int4;
using specrt::cuda::pack_int8;
using specrt::cuda::pack_plain;
using specrt::cuda::packed_bytes;
using specrt::cuda::padded_columns;
using specrt::cuda::Stored;

/// A weight in the device's form, and the values that it stands for.
struct Weight {
  std::int64_t n, k;
  std::vector<std::byte> packed;
  Floats scales;
  Vector values;
};

template <typename T>
Weight plain_weight(std::int64_t n, std::int64_t k) {
  const auto values = as<T>(random_floats(n * k, 21));
  Weight w{n, k, {}, {}, doubles(values)};
  w.packed.resize(packed_bytes(n, k, Stored::plain));
  std::vector<std::uint16_t> bits;
  for (const T value : values) bits.push_back(value.bits);
  // In two parts, as tensors that share a matrix come.
  const std::int64_t first = n / 3;
  const std::span<const std::uint16_t> all(bits);
  pack_plain(all.first(first * k), 0, first, k, w.packed);
  pack_plain(all.subspan(first * k), first, n - first, k, w.packed);
  return w;
}

inline Weight int8_weight(std::int64_t n, std::int64_t k) {
  Weight w{n, k, {}, {}, {}};
  const Floats x = random_floats(n * k, 22);
  std::vector<std::int8_t> codes(n * k);
  w.scales.resize(n);
  for (std::int64_t r = 0; r < n; ++r) {
    CHECK(specrt::cpu::quantise_int8(x.data() + r * k, k, codes.data() + r * k, w.scales[r]));
    for (std::int64_t c = 0; c < k; ++c) {
      const float value = w.scales[r] * static_cast<float>(codes[r * k + c]);
      w.values.push_back(specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value)));
    }
  }
  w.packed.resize(packed_bytes(n, k, Stored::int8));
  pack_int8(codes, 0, n, k, w.packed);
  return w;
}

// Every second output has zero points, as GPTQ's have.
inline Weight int4_weight(std::int64_t n, std::int64_t k) {
  Weight w{n, k, {}, {}, {}};
  const std::int64_t groups = (k + 31) / 32;
  const Floats x = random_floats(n * k, 23);
  std::vector<std::int8_t> codes(n * k);
  std::vector<std::uint16_t> scales, minima;
  for (std::int64_t r = 0; r < n; ++r) {
    Floats row_scales(groups), row_minima(groups);
    CHECK(specrt::cpu::quantise_int4(x.data() + r * k, k, nullptr, codes.data() + r * k,
                                     row_scales.data(), row_minima.data()));
    const bool zero_points = r % 2 == 1;
    w.scales.push_back(zero_points ? 1.0f : 0.0f);
    for (std::int64_t group = 0; group < groups; ++group) {
      if (zero_points) row_minima[group] = -7.0f - static_cast<float>(group % 3);
      scales.push_back(specrt::cpu::float_to_half(row_scales[group]));
      minima.push_back(specrt::cpu::float_to_half(row_minima[group]));
    }
    for (std::int64_t c = 0; c < k; ++c) {
      const float scale = specrt::cpu::half_to_float(scales[r * groups + c / 32]);
      const float low = specrt::cpu::half_to_float(minima[r * groups + c / 32]);
      const float value =
          static_cast<float>(codes[r * k + c]) * scale + (zero_points ? low * scale : low);
      w.values.push_back(specrt::cpu::bf16_to_float(specrt::cpu::float_to_bf16(value)));
    }
  }
  w.packed.resize(packed_bytes(n, k, Stored::int4));
  pack_int4(codes, scales, minima, 0, n, k, w.packed);
  return w;
}

/// [rows, padded_columns(k)], zeros behind k.
template <typename T>
std::vector<T> activations(std::int64_t rows, std::int64_t k) {
  const auto x = as<T>(random_floats(rows * k, 31));
  std::vector<T> padded(rows * padded_columns(k), T{0});
  for (std::int64_t i = 0; i < rows * k; ++i) padded[i / k * padded_columns(k) + i % k] = x[i];
  return padded;
}

}  // namespace cuda_test
