#pragma once

// Reductions over the vocabulary. Include after body_math.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

ArgMax arg_max(const float* x, std::int64_t n) {
  const float infinity = __builtin_inff();
  ArgMax best;
  best.value = -infinity;
  std::int64_t best_chunk = -1;
  F poison = zero();  // NaN once a NaN or +inf was seen
  // The largest by chunk first; where it is, only in the chunk that won.
  for (std::int64_t begin = 0; begin < n; begin += kVocabChunk) {
    const std::int64_t end = n - begin < kVocabChunk ? n : begin + kVocabChunk;
    F top[2] = {set1(-infinity), set1(-infinity)};
    std::int64_t i = begin;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      for (int j = 0; j < 2; ++j) {
        const F value = load(x + i + j * kWidth);
        top[j] = max(value, top[j]);
        poison = fma(max(set1(-__FLT_MAX__), value), zero(), poison);
      }
    }
    for (; i < end; i += kWidth) {
      const F value = end - i < kWidth ? load_part(x + i, end - i, -infinity) : load(x + i);
      top[0] = max(value, top[0]);
      poison = fma(max(set1(-__FLT_MAX__), value), zero(), poison);
    }
    const float value = reduce_max(max(top[0], top[1]));
    if (value > best.value) {
      best.value = value;
      best_chunk = begin;
    }
  }
  const float poisoned = reduce_add(poison);
  best.finite = best_chunk >= 0 && poisoned == 0.0f;
  if (!best.finite) return best;
  for (std::int64_t i = best_chunk;; i += kWidth) {
    const F value = n - i < kWidth ? load_part(x + i, n - i, -infinity) : load(x + i);
    const unsigned equal = equal_mask(value, set1(best.value));
    if (equal != 0) {
      best.index = i + __builtin_ctz(equal);
      best.value = x[best.index];
      return best;
    }
  }
}

template <bool kStore>
SPECRT_INLINE double exp_reduce(const float* x, std::int64_t n, float max_value,
                                float inv_temperature, float* out) {
  const F top = set1(max_value);
  const F scale = set1(inv_temperature);
  double total = 0.0;
  for (std::int64_t begin = 0; begin < n; begin += kVocabChunk) {
    const std::int64_t end = n - begin < kVocabChunk ? n : begin + kVocabChunk;
    F sums[4] = {zero(), zero(), zero(), zero()};
    std::int64_t i = begin;
    for (; i + 4 * kWidth <= end; i += 4 * kWidth) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const F e = exponential(mul(sub(load(x + i + j * kWidth), top), scale));
        if (kStore) store(out + i + j * kWidth, e);
        sums[j] = add(sums[j], e);
      }
    }
    for (; i < end; i += kWidth) {
      const std::int64_t lanes = end - i < kWidth ? end - i : kWidth;
      const F value = load_part(x + i, lanes, -__builtin_inff());
      const F e = exponential(mul(sub(value, top), scale));
      if (kStore) store_part(out + i, e, lanes);
      sums[0] = add(sums[0], e);
    }
    total += static_cast<double>(reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3]))));
  }
  return total;
}

double exp_sum(const float* x, std::int64_t n, float max_value, float inv_temperature) {
  return exp_reduce<false>(x, n, max_value, inv_temperature, nullptr);
}

double exp_weights(const float* x, std::int64_t n, float max_value, float inv_temperature,
                   float* out) {
  return exp_reduce<true>(x, n, max_value, inv_temperature, out);
}

constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

template <bool kSum>
SPECRT_INLINE Share share_of(const float* x, const float* weights, std::int64_t n, float floor) {
  const F limit = set1(floor);
  const F one = set1(1.0f);
  Share share;
  for (std::int64_t begin = 0; begin < n; begin += kVocabChunk) {
    const std::int64_t end = n - begin < kVocabChunk ? n : begin + kVocabChunk;
    F sums[4] = {zero(), zero(), zero(), zero()};
    F counts[4] = {zero(), zero(), zero(), zero()};  // exact: a chunk's are small
    std::int64_t i = begin;
    for (; i + 4 * kWidth <= end; i += 4 * kWidth) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const F value = load(x + i + j * kWidth);
        counts[j] = add(counts[j], zero_below(value, limit, one));
        if (kSum) {
          sums[j] = add(sums[j], zero_below(value, limit, load(weights + i + j * kWidth)));
        }
      }
    }
    for (; i < end; i += kWidth) {
      const std::int64_t lanes = end - i < kWidth ? end - i : kWidth;
      const F value = load_part(x + i, lanes);
      counts[0] = add(counts[0], zero_below(value, limit, load_part(kOnes, lanes)));
      if (kSum) sums[0] = add(sums[0], zero_below(value, limit, load_part(weights + i, lanes)));
    }
    share.count += static_cast<std::int64_t>(
        reduce_add(add(add(counts[0], counts[1]), add(counts[2], counts[3]))));
    share.sum += static_cast<double>(reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3]))));
  }
  return share;
}

Share share_from(const float* x, const float* weights, std::int64_t n, float floor) {
  return weights == nullptr ? share_of<false>(x, weights, n, floor)
                            : share_of<true>(x, weights, n, floor);
}

SPECRT_INLINE unsigned between_mask(F x, F low, F high) {
  return less_mask(x, high) & ~less_mask(x, low);
}

std::int64_t ids_between(const float* x, std::int64_t n, float low, float high, std::int32_t* out) {
  const F from = set1(low), to = set1(high);
  std::int32_t* next = out;
  std::int64_t i = 0;
  // Mostly nothing is between, so four vectors are left behind at a time.
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    unsigned masks[4];
    unsigned any = 0;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      masks[j] = between_mask(load(x + i + j * kWidth), from, to);
      any |= masks[j];
    }
    if (any == 0) continue;
    for (int j = 0; j < 4; ++j) {
      next += put_ids(next, static_cast<std::int32_t>(i + j * kWidth), masks[j]);
    }
  }
  for (; i < n; i += kWidth) {
    const std::int64_t lanes = n - i < kWidth ? n - i : kWidth;
    const F value = load_part(x + i, lanes, __builtin_nanf(""));
    next += put_ids(next, static_cast<std::int32_t>(i), between_mask(value, from, to));
  }
  return next - out;
}

void keep_bits(float* x, std::int64_t n, const std::uint32_t* bits) {
  const F never = set1(-__builtin_inff());
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const std::uint32_t word = bits[i / 32];
    if (word == 0xFFFFFFFFu) continue;
    for (int j = 0; j < 32; j += kWidth) {
      store(x + i + j, pick(word >> j, load(x + i + j), never));
    }
  }
  for (; i < n; ++i) {
    if ((bits[i / 32] >> (i % 32) & 1u) == 0) x[i] = -__builtin_inff();
  }
}

}  // namespace
}  // namespace specrt::cpu
