// bf16 attention on the tile unit (AMX): scores = K Q^T and outputs = P V, with q and the weights P
// rounded to bf16. What is not bf16 is AVX-512's.
//
// Query heads of one kv head, of whichever rows, lie side by side in groups of 16: the columns of a
// tile. Between the two products a vector is one position of 16 columns, so that no lane and no
// tile element ever meets another column's, and a mask says which columns a chunk counts for.

#include "cpu/vec_avx512.h"
// After the vectors; of these bodies only a part is used here.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/body_math.h"
// After the exponential:
#include "cpu/amx_config.h"
#include "cpu/body_attention_vector.h"
#pragma GCC diagnostic pop

namespace specrt::cpu {
namespace {

using Bf16 = std::uint16_t;

constexpr int kColumns = 16;
constexpr int kPairs = kChunk / 2;
constexpr int kTileBytes = 1024;
constexpr std::int64_t kStep = 32;  // of head_dim, in one product of a tile

// Groups are filled up with columns of zeros, so that heads of few rows take more than their share.
constexpr std::int64_t kMostPrepared = 2 * kMaxHeadGroup * kMaxHeadDim;

std::int64_t steps_of(std::int64_t dim) { return (dim + kStep - 1) / kStep; }
std::int64_t blocks_of(std::int64_t dim) { return (dim + kColumns - 1) / kColumns; }

/// Lanes [from, n) of 32 words that exist.
inline __mmask32 words(std::int64_t n) {
  return n >= 32 ? 0xFFFFFFFFu : n <= 0 ? 0u : (1u << n) - 1u;
}

/// 16 vectors of 32-bit elements, turned round.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // x[4a + b] holds elements b, b + 4, b + 8, b + 12 of rows 4a to 4a + 3.
  for (int b = 0; b < 4; ++b) {
    y[b] = _mm512_shuffle_i32x4(x[b], x[4 + b], 0x88);
    y[4 + b] = _mm512_shuffle_i32x4(x[b], x[4 + b], 0xDD);
    y[8 + b] = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0x88);
    y[12 + b] = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0xDD);
  }
  for (int b = 0; b < 4; ++b) {
    x[b] = _mm512_shuffle_i32x4(y[b], y[8 + b], 0x88);
    x[8 + b] = _mm512_shuffle_i32x4(y[b], y[8 + b], 0xDD);
    x[4 + b] = _mm512_shuffle_i32x4(y[4 + b], y[12 + b], 0x88);
    x[12 + b] = _mm512_shuffle_i32x4(y[4 + b], y[12 + b], 0xDD);
  }
}

class TileTask : public Task<Bf16, TileTask> {
  using Base = Task<Bf16, TileTask>;

 public:
  using Base::Base;

 private:
  friend Base;

  int groups() const { return (count_ * group_ + kColumns - 1) / kColumns; }
  Column& column(int h, int c) { return columns_[column_of_[c] + h * group_]; }
  char* prepared(int h, int group) {
    return prepared_ + (h * groups() + group) * steps_of(heads_.dim) * kTileBytes;
  }

  void start() {
    const int columns = count_ * group_;
    for (int r = 0; r < count_; ++r) {
      for (int g = 0; g < group_; ++g) {
        row_of_[r * group_ + g] = static_cast<std::uint8_t>(r);
        column_of_[r * group_ + g] = static_cast<std::uint16_t>(r * width_ + g);
      }
    }
    // Tiles 0-1: scores, 2: keys, 3: queries, 4: weights, 5: values, 6-7: outputs.
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool by_column = tile == 4 || tile >= 6;
      config.columns[tile] = 64;
      config.rows[tile] = static_cast<std::uint8_t>(by_column && columns < 16 ? columns : 16);
    }
    _tile_loadconfig(&config);
    const std::int64_t steps = steps_of(heads_.dim);
    for (int h = 0; h < kv_heads_; ++h) {
      for (int group = 0; group < groups(); ++group) {
        char* to = prepared(h, group);
        for (std::int64_t step = 0; step < steps; ++step, to += kTileBytes) {
          __m512i pairs[16];
          for (int c = 0; c < kColumns; ++c) {
            const int at = group * kColumns + c;
            __m512 low = _mm512_setzero_ps();
            __m512 high = _mm512_setzero_ps();
            if (at < columns) {
              const float* q = column(h, at).q + step * kStep;
              const __mmask32 there = words(heads_.dim - step * kStep);
              low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there), q);
              high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(there >> 16), q + 16);
            }
            pairs[c] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
          }
          transpose(pairs);
          for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 64, pairs[i]);
        }
      }
    }
  }

  void shared_rows(const std::int64_t* at, int lowest, int highest, int, int following) {
    (void)lowest;
    (void)highest;
    bool whole = false;
    for (int r = 0; r < count_; ++r) whole = whole || shares_[r] == Share::whole;
    for (int h = 0; h < kv_heads_ && whole; ++h) {
      bring(at, 0, kChunk, following, h);
      for (int group = 0; group < groups(); ++group) {
        __mmask16 mask = 0;
        for (int c = 0; c < kColumns && group * kColumns + c < count_ * group_; ++c) {
          const bool counts = shares_[row_of_[group * kColumns + c]] == Share::whole;
          mask = static_cast<__mmask16>(mask | (counts ? 1u : 0u) << c);
        }
        if (mask != 0) attend_group(h, group, mask, 0, kChunk);
      }
    }
    // Each of the others has zeros where another row may see something, be it infinite.
    for (int r = 0; r < count_; ++r) {
      if (shares_[r] == Share::part) own_row(at, r);
    }
  }

  void own_row(const std::int64_t* at, int r) {
    for (int h = 0; h < kv_heads_; ++h) {
      bring(at, firsts_[r], counts_[r], -1, h);
      const int begin = r * group_;
      const int end = begin + group_;
      for (int group = begin / kColumns; group * kColumns < end; ++group) {
        const int from = begin > group * kColumns ? begin - group * kColumns : 0;
        const int to = end < (group + 1) * kColumns ? end - group * kColumns : kColumns;
        const auto mask = static_cast<__mmask16>((1u << to) - (1u << from));
        attend_group(h, group, mask, firsts_[r], counts_[r]);
      }
    }
  }

  static bool in_a_row(const std::int64_t* at) {
    for (int i = 1; i < 16; ++i) {
      if (at[i] != at[0] + i) return false;
    }
    return true;
  }

  /// Whether sums are kept in the order that values come in by unpacking alone; settle() undoes it.
  bool shuffled() const { return heads_.dim % kStep == 0; }

  /// Keys and values of positions [first, count) as the tiles read them, zeros elsewhere.
  void bring(const std::int64_t* at, int first, int count, int following, int h) {
    if (following >= 0) fetch(following, h);
    if (first == 0 && count == kChunk && shuffled()) {
      bring_whole(at, h);
      return;
    }
    const std::int64_t dim = heads_.dim;
    const std::int64_t stride = args_.kv_heads * dim;
    const Bf16* k = keys(h);
    const Bf16* v = values(h);
    const std::int64_t wide = steps_of(dim) * kStep;
    key_tiles_[0] = keys_;
    key_tiles_[1] = keys_ + 16 * wide;
    key_stride_ = wide * 2;
    for (int i = 0; i < kChunk; i += 2) {
      const bool even = i >= first && i < count;
      const bool odd = i + 1 >= first && i + 1 < count;
      const std::int64_t a = even ? at[i] * stride : 0;
      const std::int64_t b = odd ? at[i + 1] * stride : 0;
      for (std::int64_t d = 0; d < wide; d += kStep) {
        const __mmask32 there = words(dim - d);
        const __mmask32 in_a = even ? there : 0u;
        const __mmask32 in_b = odd ? there : 0u;
        _mm512_store_si512(keys_ + i * wide + d, _mm512_maskz_loadu_epi16(in_a, k + a + d));
        _mm512_store_si512(keys_ + (i + 1) * wide + d, _mm512_maskz_loadu_epi16(in_b, k + b + d));
        __m512i x = _mm512_maskz_loadu_epi16(in_a, v + a + d);
        __m512i y = _mm512_maskz_loadu_epi16(in_b, v + b + d);
        if (!shuffled()) {
          const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
          x = _mm512_permutexvar_epi64(order, x);
          y = _mm512_permutexvar_epi64(order, y);
        }
        pair(x, y, d, i);
      }
    }
  }

  /// The same of a whole chunk; keys of whole blocks are read where they are.
  void bring_whole(const std::int64_t* at, int h) {
    const std::int64_t dim = heads_.dim;
    const std::int64_t stride = args_.kv_heads * dim;
    const Bf16* k = keys(h);
    const Bf16* v = values(h);
    for (int half = 0; half < 2; ++half) {
      const std::int64_t* from = at + 16 * half;
      key_tiles_[half] = k + from[0] * stride;
      key_stride_ = stride * 2;
    }
    if (!in_a_row(at) || !in_a_row(at + 16)) {
      for (int i = 0; i < kChunk; ++i) {
        __builtin_memcpy(keys_ + i * dim, k + at[i] * stride, static_cast<std::size_t>(dim) * 2);
      }
      key_tiles_[0] = keys_;
      key_tiles_[1] = keys_ + 16 * dim;
      key_stride_ = dim * 2;
    }
    for (int i = 0; i < kChunk; i += 2) {
      const Bf16* a = v + at[i] * stride;
      const Bf16* b = v + at[i + 1] * stride;
      for (std::int64_t d = 0; d < dim; d += kStep) {
        pair(_mm512_loadu_si512(a + d), _mm512_loadu_si512(b + d), d, i);
      }
    }
  }

  /// Two positions' values beside each other, 16 of head_dim to a tile.
  void pair(__m512i x, __m512i y, std::int64_t d, int i) {
    char* to = values_ + d / kColumns * kTileBytes + i / 2 * 64;
    _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(to + kTileBytes, _mm512_unpackhi_epi16(x, y));
  }

  void fetch(int following, int h) {
    const std::int64_t dim = heads_.dim;
    const std::int64_t stride = args_.kv_heads * dim;
    for (int i = 0; i < in_table_[following]; ++i) {
      prefetch_vector(keys(h) + places_[following][i] * stride, dim * 2);
      prefetch_vector(values(h) + places_[following][i] * stride, dim * 2);
    }
  }

  void settle(float* out) {
    if (!shuffled()) return;
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (std::int64_t d = 0; d < heads_.dim; d += kStep) {
      const F x = load(out + d);
      const F y = load(out + d + 16);
      store(out + d, _mm512_permutex2var_ps(x, low, y));
      store(out + d + 16, _mm512_permutex2var_ps(x, high, y));
    }
  }

  /// The chunk for the columns of one group that `mask` names.
  void attend_group(int h, int group, __mmask16 mask, int first, int count) {
    Column* columns[kColumns];
    alignas(64) float rescale[kColumns];
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int c = __builtin_ctz(left);
      columns[c] = &column(h, group * kColumns + c);
    }
    score(prepared(h, group));
    // The same operations on every score, sideways where there are few columns.
    if (count_ * group_ <= 4) {
      advance_few(columns, mask, first, count, rescale);
    } else {
      advance_all(columns, mask, first, count, rescale);
    }
    weigh(columns, mask, rescale);
  }

  F scaled(F score) const {
    F value = mul(score, set1(heads_.scale));
    if (heads_.softcap > 0.0f) {
      value = mul(hyperbolic_tangent(div(value, set1(heads_.softcap))), set1(heads_.softcap));
    }
    return value;
  }

  /// Scores become weights, a vector for each position.
  void advance_all(Column* const* columns, __mmask16 mask, int first, int count, float* rescale) {
    alignas(64) float tops[kColumns] = {};
    alignas(64) float sums[kColumns] = {};
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int c = __builtin_ctz(left);
      tops[c] = columns[c]->top;
      sums[c] = columns[c]->sum;
    }
    const F before = load(tops);
    F highest[4];
    for (F& one : highest) one = before;
    for (int j = first; j < count; ++j) {
      const F value = scaled(load(scores_ + j * kColumns));
      store(scores_ + j * kColumns, value);
      highest[j % 4] = max(value, highest[j % 4]);
    }
    const F top = max(max(highest[0], highest[1]), max(highest[2], highest[3]));
    store(tops, top);
    const F scale = exponential(sub(before, top));
    store(rescale, scale);
    __m512i pairs[kPairs];
    for (int i = 0; i < kPairs; ++i) {
      F weight[2];
      for (int j = 0; j < 2; ++j) {
        const int position = 2 * i + j;
        const bool inside = position >= first && position < count;
        float* at = scores_ + position * kColumns;
        weight[j] = inside ? exponential(sub(load(at), top)) : zero();
        store(at, weight[j]);
      }
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1], weight[0]));
      // The two halves, word by word.
      const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
      const __m512i mixed = _mm512_permutexvar_epi64(order, both);
      pairs[i] = _mm512_unpacklo_epi16(mixed, _mm512_bsrli_epi128(mixed, 8));
    }
    // As reduce_add adds lanes.
    F added[kColumns];
    for (int i = 0; i < 16; ++i) {
      added[i] = add(load(scores_ + i * kColumns), load(scores_ + (i + 16) * kColumns));
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) added[i] = add(added[i], added[i + half]);
    }
    store(sums, fma(load(sums), scale, added[0]));
    transpose(pairs);
    for (int c = 0; c < kColumns; ++c) _mm512_store_si512(weights_ + c * 64, pairs[c]);
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int c = __builtin_ctz(left);
      columns[c]->top = tops[c];
      columns[c]->sum = sums[c];
    }
  }

  /// The same for the first four columns at most, two vectors for each.
  void advance_few(Column* const* columns, __mmask16 mask, int first, int count, float* rescale) {
    F scores[4][2];
    for (int half = 0; half < 2; ++half) {
      F four[4];
      for (int i = 0; i < 4; ++i) {
        const float* from = scores_ + (16 * half + i) * kColumns;
        four[i] = _mm512_castps128_ps512(_mm_load_ps(from));
        four[i] = _mm512_insertf32x4(four[i], _mm_load_ps(from + 4 * kColumns), 1);
        four[i] = _mm512_insertf32x4(four[i], _mm_load_ps(from + 8 * kColumns), 2);
        four[i] = _mm512_insertf32x4(four[i], _mm_load_ps(from + 12 * kColumns), 3);
      }
      const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(four[0], four[1]));
      const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(four[2], four[3]));
      const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(four[0], four[1]));
      const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(four[2], four[3]));
      scores[0][half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
      scores[1][half] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
      scores[2][half] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
      scores[3][half] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
    }
    const __mmask32 inside = words(count) & ~words(first);
    const __mmask16 in[2] = {static_cast<__mmask16>(inside), static_cast<__mmask16>(inside >> 16)};
    alignas(64) float differences[kColumns] = {};
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int c = __builtin_ctz(left);
      Column& column = *columns[c];
      F top = set1(column.top);
      for (int half = 0; half < 2; ++half) {
        const F value = scaled(scores[c][half]);
        scores[c][half] = _mm512_mask_mov_ps(set1(-__builtin_inff()), in[half], value);
        top = max(scores[c][half], top);
      }
      const float highest = reduce_max(top);
      differences[c] = column.top - highest;
      column.top = highest;
    }
    store(rescale, exponential(load(differences)));
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int c = __builtin_ctz(left);
      Column& column = *columns[c];
      F weight[2];
      for (int half = 0; half < 2; ++half) {
        weight[half] = exponential(sub(scores[c][half], set1(column.top)));
      }
      column.sum = __builtin_fmaf(column.sum, rescale[c], reduce_add(add(weight[0], weight[1])));
      _mm512_store_si512(weights_ + c * 64,
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1], weight[0])));
    }
  }

  /// scores_[position][column]
  void score(const char* queries) {
    const std::int64_t steps = steps_of(heads_.dim);
    _tile_zero(0);
    _tile_zero(1);
    for (std::int64_t step = 0; step < steps; ++step) {
      _tile_loadd(3, queries + step * kTileBytes, 64);
      _tile_loadd(2, key_tiles_[0] + step * kStep, key_stride_);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(2, key_tiles_[1] + step * kStep, key_stride_);
      _tile_dpbf16ps(1, 2, 3);
    }
    _tile_stored(0, scores_, 64);
    _tile_stored(1, scores_ + 16 * kColumns, 64);
  }

  /// out = out * rescale + weights . values
  void weigh(Column* const* columns, __mmask16 mask, const float* rescale) {
    const std::int64_t blocks = blocks_of(heads_.dim);
    _tile_loadd(4, weights_, 64);
    for (std::int64_t block = 0; block < blocks; block += 2) {
      _tile_zero(6);
      _tile_loadd(5, values_ + block * kTileBytes, 64);
      _tile_dpbf16ps(6, 4, 5);
      _tile_stored(6, outputs_[0], 64);
      _tile_zero(7);
      // Blocks come in twos; the last one may be of zeros and is not used then.
      _tile_loadd(5, values_ + (block + 1) * kTileBytes, 64);
      _tile_dpbf16ps(7, 4, 5);
      _tile_stored(7, outputs_[1], 64);
      for (std::int64_t half = 0; half < 2 && block + half < blocks; ++half) {
        const std::int64_t d = (block + half) * kColumns;
        const std::int64_t lanes = heads_.dim - d < kColumns ? heads_.dim - d : kColumns;
        for (unsigned left = mask; left != 0; left &= left - 1) {
          const int c = __builtin_ctz(left);
          float* out = columns[c]->out + d;
          const F more = load(outputs_[half] + c * kColumns);
          store_lanes(out, fma(load_lanes(out, lanes), set1(rescale[c]), more), lanes);
        }
      }
    }
  }

  std::uint8_t row_of_[kMostRows * kMaxHeadGroup];
  std::uint16_t column_of_[kMostRows * kMaxHeadGroup];  // in columns_, for the first kv head
  alignas(64) char prepared_[kMostPrepared * 2];
  const Bf16* key_tiles_[2];  // of 16 positions each
  std::int64_t key_stride_;   // bytes
  alignas(64) Bf16 keys_[kChunk * kMaxHeadDim];
  alignas(64) char values_[(kMaxHeadDim / kColumns) * kTileBytes];
  alignas(64) float scores_[kChunk * kColumns];
  alignas(64) char weights_[kTileBytes];
  alignas(64) float outputs_[2][kColumns * kColumns];
};

std::int64_t heads_that_fit(const AttentionArgs& args, const AttentionUnit& unit) {
  const std::int64_t group = args.q_heads / args.kv_heads;
  const std::int64_t padded = (unit.rows * group + kColumns - 1) / kColumns * kColumns;
  const std::int64_t fit = kMostPrepared / (padded * steps_of(args.head_dim) * kStep);
  const std::int64_t most = heads_at_once(args, unit);
  return fit < 1 ? 1 : fit < most ? fit : most;
}

void tile_attention(const AttentionArgs& args, std::int64_t task_begin, std::int64_t task_end) {
  if (args.kv_dtype != KvDType::bf16) {
    avx512_kernels()->attention(args, task_begin, task_end);
    return;
  }
  if (task_begin >= task_end) return;
  for_head_runs(
      args, task_begin, task_end,
      [&](const AttentionUnit& unit) { return heads_that_fit(args, unit); },
      [&](const AttentionUnit& unit, std::int64_t kv_head, int heads) {
        TileTask(args, unit, kv_head, heads).run(unit.segment);
      });
  _tile_release();
}

}  // namespace

void fill_amx_attention(Kernels& table) { table.attention = tile_attention; }

}  // namespace specrt::cpu
