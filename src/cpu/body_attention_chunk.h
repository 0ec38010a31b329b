#pragma once

// A chunk of keys and values against a few query heads: scores, running softmax, weighted sums.
// What a head gets is the same whichever others share the call. Include after body_math.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr int kChunk = static_cast<int>(kAttentionChunk);
constexpr int kHeadsAtOnce = 4;
static_assert(kChunk % kWidth == 0 && kHeadsAtOnce <= kWidth);

SPECRT_INLINE F load_lanes(const std::uint16_t* p, std::int64_t lanes) {
  return lanes == kWidth ? load_bf16(p) : load_bf16_part(p, lanes);
}
SPECRT_INLINE F load_lanes(const std::int8_t* p, std::int64_t lanes) {
  return lanes == kWidth ? load_i8(p) : load_i8_part(p, lanes);
}

/// A query head of a row, and its softmax as far as it has come.
struct Column {
  const float* q;
  float* out;  ///< sums of weight * value
  float top;   ///< highest score
  float sum;   ///< of weights
};

/// What the heads of a model have in common.
struct Heads {
  std::int64_t dim;
  float scale;
  float softcap;
};

/// Positions [first, count) of a chunk: a key at k + at[i] * stride.
template <typename T>
struct Chunk {
  const T* k;
  const T* v;
  std::int64_t stride;
  const std::int64_t* at;
  const float* k_scales;  ///< [kChunk], or null where values are as they are
  const float* v_scales;
  int first;
  int count;
  /// Keys that come next; fetched, with this chunk's values, while scores are computed. -1: nothing
  /// is fetched.
  const std::int64_t* next;
  int next_count;
};

SPECRT_INLINE void prefetch_vector(const void* vector, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(vector) + i);
  }
}

/// sums[g][from + j] += q[g][d...] . key[from + j][d...], still spread over the lanes.
template <typename T, int G, int J>
SPECRT_INLINE void dot_step(Column* const* columns, const T* const (&key)[4], int from,
                            std::int64_t d, std::int64_t lanes, F (&partial)[G][J]) {
  F k[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) k[j] = load_lanes(key[from + j] + d, lanes);
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const F value = load_lanes(columns[g]->q + d, lanes);
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) partial[g][j] = fma(k[j], value, partial[g][j]);
  }
}

template <typename T, int G, int J>
SPECRT_INLINE void dot(Column* const* columns, const T* const (&key)[4], int from, std::int64_t dim,
                       F (&sums)[G][4]) {
  F partial[G][J];
#pragma GCC unroll 16
  for (int i = 0; i < G * J; ++i) partial[i / J][i % J] = zero();
  std::int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) dot_step(columns, key, from, d, kWidth, partial);
  if (d < dim) dot_step(columns, key, from, d, dim - d, partial);
#pragma GCC unroll 16
  for (int i = 0; i < G * J; ++i) sums[i / J][from + i % J] = partial[i / J][i % J];
}

/// scores[g][j] = scale * (q[g] . k[j]); -inf beyond the chunk's positions.
template <typename T, int G>
SPECRT_INLINE void score(const Heads& heads, const Chunk<T>& chunk, Column* const* columns,
                         float (&scores)[G][kChunk]) {
  const std::int64_t bytes = heads.dim * static_cast<std::int64_t>(sizeof(T));
  constexpr int kTogether = G * 4 <= kAccumulators ? 4 : 2;
  for (int from = 0; from < kChunk; from += kWidth) {
    F quads[G][kWidth / 4];
    for (int quad = 0; quad < kWidth / 4; ++quad) {
      const int j = from + 4 * quad;
      if (chunk.next_count >= 0) {
        for (int i = j; i < j + 4; ++i) {
          if (i < chunk.count) prefetch_vector(chunk.v + chunk.at[i] * chunk.stride, bytes);
          if (i < chunk.next_count) prefetch_vector(chunk.k + chunk.next[i] * chunk.stride, bytes);
        }
      }
      if (j >= chunk.count || j + 4 <= chunk.first) {
        for (int g = 0; g < G; ++g) quads[g][quad] = zero();
        continue;
      }
      F sums[G][4];
      const T* key[4];
      for (int i = 0; i < 4; ++i) {
        // Outside any position will do: its score is overwritten.
        const bool inside = j + i >= chunk.first && j + i < chunk.count;
        key[i] = chunk.k + chunk.at[inside ? j + i : chunk.first] * chunk.stride;
      }
      for (int i = 0; i < 4; i += kTogether) {
        dot<T, G, kTogether>(columns, key, i, heads.dim, sums);
      }
      for (int g = 0; g < G; ++g) {
        quads[g][quad] = reduce_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
      }
    }
    for (int g = 0; g < G; ++g) {
      F value = reduce_quads(quads[g]);
      if (chunk.k_scales != nullptr) value = mul(value, load(chunk.k_scales + from));
      value = mul(value, set1(heads.scale));
      if (heads.softcap > 0.0f) {
        value = mul(hyperbolic_tangent(div(value, set1(heads.softcap))), set1(heads.softcap));
      }
      store(scores[g] + from, value);
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int j = 0; j < chunk.first; ++j) scores[g][j] = -__builtin_inff();
    for (int j = chunk.count; j < kChunk; ++j) scores[g][j] = -__builtin_inff();
  }
}

/// Scores become weights against the new maxima; earlier results are to be scaled by `rescale`.
template <int G>
SPECRT_INLINE void advance(Column* const* columns, const float* v_scales,
                           float (&scores)[G][kChunk], float (&rescale)[kWidth]) {
  for (int g = 0; g < kWidth; ++g) rescale[g] = 0.0f;
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    F top = load(scores[g]);
    for (int j = kWidth; j < kChunk; j += kWidth) top = max(load(scores[g] + j), top);
    const float chunk_top = reduce_max(top);
    const float new_top = chunk_top > columns[g]->top ? chunk_top : columns[g]->top;
    rescale[g] = columns[g]->top - new_top;
    columns[g]->top = new_top;
  }
  store(rescale, exponential(load(rescale)));
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    F sums = zero();
    for (int j = 0; j < kChunk; j += kWidth) {
      F weight = exponential(sub(load(scores[g] + j), set1(columns[g]->top)));
      sums = add(sums, weight);
      if (v_scales != nullptr) weight = mul(weight, load(v_scales + j));
      store(scores[g] + j, weight);
    }
    columns[g]->sum = columns[g]->sum * rescale[g] + reduce_add(sums);
  }
}

/// out[g][d...] = out * rescale + sum over the chunk of weight * v, for V vectors from d on.
template <typename T, int G, int V>
SPECRT_INLINE void weigh(const Chunk<T>& chunk, Column* const* columns,
                         const float (&weights)[G][kChunk], const float (&rescale)[kWidth],
                         std::int64_t d, std::int64_t lanes) {
  F sums[G][V];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      sums[g][v] = mul(load_lanes(columns[g]->out + d + v * kWidth, lanes), set1(rescale[g]));
    }
  }
  for (int j = chunk.first; j < chunk.count; ++j) {
    const T* from = chunk.v + chunk.at[j] * chunk.stride + d;
    F value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) value[v] = load_lanes(from + v * kWidth, lanes);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F weight = set1(weights[g][j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[g][v] = fma(weight, value[v], sums[g][v]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      store_lanes(columns[g]->out + d + v * kWidth, sums[g][v], lanes);
    }
  }
}

/// One chunk for G heads that see the same positions of it.
template <typename T, int G>
void attend_chunk(const Heads& heads, const Chunk<T>& chunk, Column* const* columns) {
  alignas(64) float scores[G][kChunk];
  alignas(64) float rescale[kWidth];
  score<T, G>(heads, chunk, columns, scores);
  advance<G>(columns, chunk.v_scales, scores, rescale);
  constexpr int kVectors = G * 4 <= (kAccumulators < 12 ? 12 : kAccumulators) ? 4 : 2;
  std::int64_t d = 0;
  for (; d + kVectors * kWidth <= heads.dim; d += kVectors * kWidth) {
    weigh<T, G, kVectors>(chunk, columns, scores, rescale, d, kWidth);
  }
  for (; d + kWidth <= heads.dim; d += kWidth) {
    weigh<T, G, 1>(chunk, columns, scores, rescale, d, kWidth);
  }
  if (d < heads.dim) weigh<T, G, 1>(chunk, columns, scores, rescale, d, heads.dim - d);
}

template <typename T>
SPECRT_INLINE void attend_columns(int count, const Heads& heads, const Chunk<T>& chunk,
                                  Column* const* columns) {
  using Function = void (*)(const Heads&, const Chunk<T>&, Column* const*);
  static constexpr Function kByCount[kHeadsAtOnce + 1] = {
      nullptr, attend_chunk<T, 1>, attend_chunk<T, 2>, attend_chunk<T, 3>, attend_chunk<T, 4>};
  kByCount[count](heads, chunk, columns);
}

}  // namespace
}  // namespace specrt::cpu
