#pragma once

// Elementwise kernels and the norm. Include after a vec_*.h.

#include "cpu/body_functions.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float eps,
              std::int64_t rows, std::int64_t width, bool round, float* out,
              std::int64_t out_stride) {
  for (std::int64_t r = 0; r < rows; ++r, x += x_stride, out += out_stride) {
    F sums[4] = {zero(), zero(), zero(), zero()};
    std::int64_t i = 0;
    for (; i + 4 * kWidth <= width; i += 4 * kWidth) {
      for (int j = 0; j < 4; ++j) {
        const F value = load(x + i + j * kWidth);
        sums[j] = fma(value, value, sums[j]);
      }
    }
    for (; i < width; i += kWidth) {
      const F value = load_lanes(x + i, width - i < kWidth ? width - i : kWidth);
      sums[0] = fma(value, value, sums[0]);
    }
    const float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    const float mean = sum / static_cast<float>(width);
    const F scale = set1(1.0f / __builtin_sqrtf(mean + eps));
    for_vectors(width, [&](std::int64_t j, std::int64_t lanes) __attribute__((always_inline)) {
      F value = mul(mul(load_lanes(x + j, lanes), scale), load_lanes(weight + j, lanes));
      if (round) value = round_bf16(value);
      store_lanes(out + j, value, lanes);
    });
  }
}

void rope(float* x, std::int64_t heads, std::int64_t head_dim, const float* cos, const float* sin) {
  const std::int64_t half = head_dim / 2;
  for (std::int64_t h = 0; h < heads; ++h, x += head_dim) {
    for_vectors(half, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
      const F a = load_lanes(x + i, lanes), b = load_lanes(x + half + i, lanes);
      const F c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
      store_lanes(x + i, fnma(b, s, mul(a, c)), lanes);
      store_lanes(x + half + i, fma(a, s, mul(b, c)), lanes);
    });
  }
}

void softcap(float* x, std::int64_t n, float cap) {
  for_vectors(n, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = load_lanes(x + i, lanes);
    store_lanes(x + i, mul(hyperbolic_tangent(div(value, set1(cap))), set1(cap)), lanes);
  });
}

void scale_by(float* x, std::int64_t n, float scale) {
  for_vectors(n, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    store_lanes(x + i, mul(load_lanes(x + i, lanes), set1(scale)), lanes);
  });
}

void add_scaled(float* x, const float* y, std::int64_t n, float scale) {
  for_vectors(n, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = fma(set1(scale), load_lanes(y + i, lanes), load_lanes(x + i, lanes));
    store_lanes(x + i, value, lanes);
  });
}

void store_as(const float* x, std::int64_t n, DType dtype, void* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, x, static_cast<std::size_t>(n) * 4);
    return;
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(out);
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_bf16(to + i, load(x + i));
  if (i < n) store_bf16_part(to + i, load_part(x + i, n - i), n - i);
}

void load_as(const void* x, std::int64_t n, DType dtype, float* out) {
  if (dtype == DType::f32) {
    __builtin_memcpy(out, x, static_cast<std::size_t>(n) * 4);
    return;
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load_bf16(from + i));
  if (i < n) store_part(out + i, load_bf16_part(from + i, n - i), n - i);
}

}  // namespace
}  // namespace specrt::cpu
