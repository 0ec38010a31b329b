#pragma once

// Keys and values on their way into the cache. Include after body_math.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

/// One head's vector as scale * whole numbers; a function of its values alone.
SPECRT_INLINE float store_quantised(const float* x, std::int64_t n, std::int8_t* out) {
  F top = zero();
  F finite = zero();  // NaN where a value is NaN or infinite
  for_vectors(n, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = load_lanes(x + i, lanes);
    top = max(max(value, sub(zero(), value)), top);
    finite = fma(value, zero(), finite);
  });
  const float most = reduce_max(top);
  const bool whole = reduce_add(finite) == 0.0f;
  // Below this, 127 / most would be near infinity.
  if (!whole || most < 0x1p-100f) {
    __builtin_memset(out, 0, static_cast<std::size_t>(n));
    return whole ? 0.0f : __builtin_nanf("");
  }
  const F factor = set1(127.0f / most);
  for_vectors(n, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F value = mul(load_lanes(x + i, lanes), factor);
    if (lanes == kWidth) {
      store_i8(out + i, value);
    } else {
      store_i8_part(out + i, value, lanes);
    }
  });
  return most / 127.0f;
}

void store_kv(const float* x, std::int64_t heads, std::int64_t head_dim, KvDType dtype, void* out,
              float* scales) {
  if (dtype != KvDType::i8) {
    store_as(x, heads * head_dim, dtype == KvDType::f32 ? DType::f32 : DType::bf16, out);
    return;
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    scales[h] =
        store_quantised(x + h * head_dim, head_dim, static_cast<std::int8_t*>(out) + h * head_dim);
  }
}

}  // namespace
}  // namespace specrt::cpu
