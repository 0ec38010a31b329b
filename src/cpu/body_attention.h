#pragma once

// Softmax attention over paged keys and values: online by chunks of absolute position, so that a
// row's result depends on positions and values alone, wherever they are stored. Include after
// body_math.h.

#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr int kChunk = static_cast<int>(kAttentionChunk);
constexpr int kHeadsAtOnce = 4;
constexpr int kMaxGroup = 64;
static_assert(kChunk % kWidth == 0 && kHeadsAtOnce <= kWidth);

SPECRT_INLINE F load_lanes(const std::uint16_t* p, std::int64_t lanes) {
  return lanes == kWidth ? load_bf16(p) : load_bf16_part(p, lanes);
}

/// Where one chunk's positions start in the cache, in elements.
struct Places {
  int count = 0;
  int first = 0;  ///< positions before it have left the window
  std::int64_t at[kChunk];
};

SPECRT_INLINE void find_places(const AttentionArgs& args, const AttentionRow& row,
                               std::int64_t kv_head, std::int64_t begin, Places& places) {
  const std::int64_t total = row.table_positions + row.path_length;
  const std::int64_t left = total - begin;
  places.count = static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk);
  const std::int64_t gone = args.window > 0 ? total - args.window - begin : 0;
  places.first = static_cast<int>(gone < 0 ? 0 : gone < places.count ? gone : places.count);
  const std::int64_t stride = args.kv_heads * args.head_dim;
  const std::int64_t base = kv_head * args.head_dim;
  int i = places.first;
  if (begin + i < row.table_positions) {
    std::int64_t block = (begin + i) / args.block_size;
    std::int64_t inside = (begin + i) % args.block_size;
    for (; i < places.count && begin + i < row.table_positions; ++i) {
      places.at[i] = (row.table[block] * args.block_size + inside) * stride + base;
      if (++inside == args.block_size) {
        inside = 0;
        ++block;
      }
    }
  }
  for (; i < places.count; ++i) {
    places.at[i] = (args.path_base + row.path[begin + i - row.table_positions]) * stride + base;
  }
  // What has left the window may be gone from the cache; its scores are masked below.
  for (i = 0; i < places.first; ++i) places.at[i] = places.at[places.first];
}

SPECRT_INLINE void prefetch_row(const void* row, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + i);
  }
}

/// sums[g][i] = q[g] . key[i], still spread over the lanes, for J of four positions.
template <typename T, int G, int J>
SPECRT_INLINE void dot(const float* q, const T* const (&key)[4], int from, std::int64_t head_dim,
                       F (&sums)[G][4]) {
  F partial[G][J];
#pragma GCC unroll 16
  for (int i = 0; i < G * J; ++i) partial[i / J][i % J] = zero();
  for (std::int64_t d = 0; d < head_dim; d += kWidth) {
    const std::int64_t lanes = head_dim - d < kWidth ? head_dim - d : kWidth;
    F k[J];
#pragma GCC unroll 4
    for (int i = 0; i < J; ++i) k[i] = load_lanes(key[from + i] + d, lanes);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F value = load_lanes(q + g * head_dim + d, lanes);
#pragma GCC unroll 4
      for (int i = 0; i < J; ++i) partial[g][i] = fma(k[i], value, partial[g][i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < G * J; ++i) sums[i / J][from + i % J] = partial[i / J][i % J];
}

/// scores[g][j] = scale * (q[g] . k[j]); -inf beyond the chunk's positions.
template <typename T, int G>
SPECRT_INLINE void score(const AttentionArgs& args, const float* q, const Places& here,
                         const Places& following, float (&scores)[G][kChunk]) {
  const T* keys = static_cast<const T*>(args.k);
  const T* values = static_cast<const T*>(args.v);
  const std::int64_t row_bytes = args.head_dim * static_cast<std::int64_t>(sizeof(T));
  constexpr int kTogether = G * 4 <= kAccumulators ? 4 : 2;
  for (int first = 0; first < kChunk; first += kWidth) {
    F quads[G][kWidth / 4];
    for (int quad = 0; quad < kWidth / 4; ++quad) {
      const int j = first + 4 * quad;
      F sums[G][4];
      const T* key[4];
      for (int i = 0; i < 4; ++i) {
        // Beyond the end any position will do: its score is overwritten.
        key[i] = keys + here.at[j + i < here.count ? j + i : 0];
        if (j + i < here.count) prefetch_row(values + here.at[j + i], row_bytes);
        if (j + i < following.count) prefetch_row(keys + following.at[j + i], row_bytes);
      }
      if (j < here.count) {
        for (int i = 0; i < 4; i += kTogether) {
          dot<T, G, kTogether>(q, key, i, args.head_dim, sums);
        }
        for (int g = 0; g < G; ++g) {
          quads[g][quad] = reduce_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
        }
      } else {
        for (int g = 0; g < G; ++g) quads[g][quad] = zero();
      }
    }
    for (int g = 0; g < G; ++g) {
      F value = mul(reduce_quads(quads[g]), set1(args.scale));
      if (args.softcap > 0.0f) {
        value = mul(hyperbolic_tangent(div(value, set1(args.softcap))), set1(args.softcap));
      }
      store(scores[g] + first, value);
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int j = 0; j < here.first; ++j) scores[g][j] = -__builtin_inff();
    for (int j = here.count; j < kChunk; ++j) scores[g][j] = -__builtin_inff();
  }
}

/// Running state of one head's softmax.
struct Softmax {
  float top;
  float sum;
};

/// Scores become weights against the new maxima; earlier results are to be scaled by `rescale`.
template <int G>
SPECRT_INLINE void advance(Softmax* states, float (&scores)[G][kChunk], float (&rescale)[kWidth]) {
  for (int g = 0; g < kWidth; ++g) rescale[g] = 0.0f;
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    F top = load(scores[g]);
    for (int j = kWidth; j < kChunk; j += kWidth) top = max(load(scores[g] + j), top);
    const float chunk_top = reduce_max(top);
    const float new_top = chunk_top > states[g].top ? chunk_top : states[g].top;
    rescale[g] = states[g].top - new_top;
    states[g].top = new_top;
  }
  store(rescale, exponential(load(rescale)));
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    F sums = zero();
    for (int j = 0; j < kChunk; j += kWidth) {
      const F weight = exponential(sub(load(scores[g] + j), set1(states[g].top)));
      store(scores[g] + j, weight);
      sums = add(sums, weight);
    }
    states[g].sum = states[g].sum * rescale[g] + reduce_add(sums);
  }
}

/// out[g][d...] = out * rescale + sum over the chunk of weight * v, for V vectors from d on.
template <typename T, int G, int V>
SPECRT_INLINE void weigh(const AttentionArgs& args, const Places& here,
                         const float (&weights)[G][kChunk], const float (&rescale)[kWidth],
                         std::int64_t d, std::int64_t lanes, float* out) {
  const T* values = static_cast<const T*>(args.v) + d;
  F sums[G][V];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const F before = load_lanes(out + g * args.head_dim + d + v * kWidth, lanes);
      sums[g][v] = mul(before, set1(rescale[g]));
    }
  }
  for (int j = here.first; j < here.count; ++j) {
    F value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) value[v] = load_lanes(values + here.at[j] + v * kWidth, lanes);
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
      store_lanes(out + g * args.head_dim + d + v * kWidth, sums[g][v], lanes);
    }
  }
}

/// One chunk for G heads that share a key/value head.
template <typename T, int G>
void attend_chunk(const AttentionArgs& args, const float* q, const Places& here,
                  const Places& following, Softmax* states, float* out) {
  alignas(64) float scores[G][kChunk];
  alignas(64) float rescale[kWidth];
  score<T, G>(args, q, here, following, scores);
  advance<G>(states, scores, rescale);
  constexpr int kVectors = G <= 3 ? 4 : 2;
  std::int64_t d = 0;
  for (; d + kVectors * kWidth <= args.head_dim; d += kVectors * kWidth) {
    weigh<T, G, kVectors>(args, here, scores, rescale, d, kWidth, out);
  }
  for (; d + kWidth <= args.head_dim; d += kWidth) {
    weigh<T, G, 1>(args, here, scores, rescale, d, kWidth, out);
  }
  if (d < args.head_dim) {
    weigh<T, G, 1>(args, here, scores, rescale, d, args.head_dim - d, out);
  }
}

template <typename T>
SPECRT_INLINE void attend_heads(int heads, const AttentionArgs& args, const float* q,
                                const Places& here, const Places& following, Softmax* states,
                                float* out) {
  using Function =
      void (*)(const AttentionArgs&, const float*, const Places&, const Places&, Softmax*, float*);
  static constexpr Function kByHeads[kHeadsAtOnce + 1] = {
      nullptr, attend_chunk<T, 1>, attend_chunk<T, 2>, attend_chunk<T, 3>, attend_chunk<T, 4>};
  kByHeads[heads](args, q, here, following, states, out);
}

template <typename T>
void attend(const AttentionArgs& args, const AttentionRow& row, std::int64_t kv_head) {
  const int group = static_cast<int>(args.q_heads / args.kv_heads);
  const std::int64_t width = group * args.head_dim;
  const float* q = row.q + kv_head * width;
  float* out = row.out + kv_head * width;
  const std::int64_t total = row.table_positions + row.path_length;

  for (std::int64_t i = 0; i < width; ++i) out[i] = 0.0f;
  if (total <= 0) return;
  Softmax states[kMaxGroup];
  for (int g = 0; g < group; ++g) states[g] = {-__builtin_inff(), 0.0f};
  Places places[2];
  const std::int64_t gone = args.window > 0 && total > args.window ? total - args.window : 0;
  const std::int64_t start = gone / kChunk * kChunk;
  find_places(args, row, kv_head, start, places[0]);
  int now = 0;
  for (std::int64_t begin = start; begin < total; begin += kChunk, now = 1 - now) {
    find_places(args, row, kv_head, begin + kChunk, places[1 - now]);
    for (int g = 0; g < group; g += kHeadsAtOnce) {
      const int heads = group - g < kHeadsAtOnce ? group - g : kHeadsAtOnce;
      attend_heads<T>(heads, args, q + g * args.head_dim, places[now], places[1 - now], states + g,
                      out + g * args.head_dim);
    }
  }
  for (int g = 0; g < group; ++g) {
    const F scale = set1(1.0f / states[g].sum);
    float* head = out + g * args.head_dim;
    for (std::int64_t d = 0; d < args.head_dim; d += kWidth) {
      const std::int64_t lanes = args.head_dim - d < kWidth ? args.head_dim - d : kWidth;
      F value = mul(load_lanes(head + d, lanes), scale);
      if (args.round_output) value = round_bf16(value);
      store_lanes(head + d, value, lanes);
    }
  }
}

void attention(const AttentionArgs& args, std::int64_t task_begin, std::int64_t task_end) {
  for (std::int64_t task = task_begin; task < task_end; ++task) {
    const AttentionRow& row = args.rows[task / args.kv_heads];
    const std::int64_t kv_head = task % args.kv_heads;
    if (args.kv_dtype == DType::f32) {
      attend<float>(args, row, kv_head);
    } else {
      attend<std::uint16_t>(args, row, kv_head);
    }
  }
}

}  // namespace
}  // namespace specrt::cpu
