#pragma once

// Softmax attention over paged keys and values. Positions are reduced by chunks, chunks by
// segments, segments in order, so that a row's result depends on positions and values alone: not on
// where they are stored, which rows are done together, or who does which segment. Include after
// body_math.h.

#include "cpu/body_attention_chunk.h"
#include "cpu/kernels.h"

namespace specrt::cpu {
namespace {

constexpr int kMostRows = static_cast<int>(kAttentionRows);

/// The positions of a row: [gone, total), which lie in segments [first_segment, end_segment).
struct Extent {
  std::int64_t total;
  std::int64_t gone;
  std::int64_t first_segment;
  std::int64_t end_segment;
};

SPECRT_INLINE Extent extent_of(const AttentionArgs& args, const AttentionRow& row) {
  Extent e;
  e.total = row.table_positions + row.path_length;
  e.gone = args.window > 0 && e.total > args.window ? e.total - args.window : 0;
  e.first_segment = e.gone / kAttentionSegment;
  e.end_segment = (e.total + kAttentionSegment - 1) / kAttentionSegment;
  return e;
}

/// Takes a later segment's result into that of the segments before it.
SPECRT_INLINE void combine(float& top, float& sum, float* out, float later_top, float later_sum,
                           const float* later_out, std::int64_t dim) {
  const float new_top = later_top > top ? later_top : top;
  alignas(64) float scale[kWidth] = {};
  scale[0] = top - new_top;
  scale[1] = later_top - new_top;
  store(scale, exponential(load(scale)));
  top = new_top;
  sum = sum * scale[0] + later_sum * scale[1];
  const F before = set1(scale[0]);
  const F later = set1(scale[1]);
  for_vectors(dim, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    const F scaled = mul(load_lanes(out + i, lanes), before);
    store_lanes(out + i, fma(load_lanes(later_out + i, lanes), later, scaled), lanes);
  });
}

SPECRT_INLINE void finish(const AttentionArgs& args, float sum, float* out) {
  const F scale = set1(1.0f / sum);
  for_vectors(args.head_dim,
              [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
                F value = mul(load_lanes(out + i, lanes), scale);
                if (args.round_output) value = round_bf16(value);
                store_lanes(out + i, value, lanes);
              });
}

/// Slots of positions [begin, begin + count) that the block table names.
SPECRT_INLINE void find_in_table(const AttentionArgs& args, const AttentionRow& row,
                                 std::int64_t begin, int count, std::int64_t* at) {
  if (count <= 0) return;
  std::int64_t block = begin / args.block_size;
  std::int64_t inside = begin % args.block_size;
  for (int i = 0; i < count; ++i) {
    at[i] = row.table[block] * args.block_size + inside;
    if (++inside == args.block_size) {
      inside = 0;
      ++block;
    }
  }
}

/// Rows of one block table and a few kv heads, which lie beside each other in memory. `Self` does a
/// chunk: start() once q is known, shared_rows() for rows of Share::whole and part, own_row(); and
/// settle() brings a segment's sums into their order.
template <typename T, typename Self>
class Task {
 public:
  Task(const AttentionArgs& args, const AttentionUnit& unit, std::int64_t kv_head, int kv_heads)
      : args_(args),
        rows_(args.rows + unit.first_row),
        kv_head_(kv_head),
        kv_heads_(kv_heads),
        count_(static_cast<int>(unit.rows)),
        group_(static_cast<int>(args.q_heads / args.kv_heads)),
        width_(kv_heads * group_),
        q_head_(kv_head * group_),
        heads_{args.head_dim, args.scale, args.softcap} {}

  void run(std::int64_t only_segment) {
    std::int64_t first = INT64_MAX;
    std::int64_t end = 0;
    for (int r = 0; r < count_; ++r) {
      extents_[r] = extent_of(args_, rows_[r]);
      first = extents_[r].first_segment < first ? extents_[r].first_segment : first;
      end = extents_[r].end_segment > end ? extents_[r].end_segment : end;
      const std::int64_t in_table = rows_[r].table_positions;
      most_in_table_ = in_table > most_in_table_ ? in_table : most_in_table_;
      for (int i = 0; i < width_; ++i) {
        columns_[r * width_ + i].q = rows_[r].q + (q_head_ + i) * heads_.dim;
      }
    }
    self().start();
    if (only_segment >= 0) {
      run_segment(only_segment);
      return;
    }
    for (std::int64_t s = first; s < end; ++s) run_segment(s);
    for (int r = 0; r < count_; ++r) {
      for (int i = 0; i < width_; ++i) finish(args_, before_[r * width_ + i].sum, head_out(r, i));
    }
  }

 protected:
  enum class Share : std::uint8_t { none, whole, part, own };

  float* head_out(int r, int i) const { return rows_[r].out + (q_head_ + i) * heads_.dim; }

  void run_segment(std::int64_t segment) {
    std::int64_t begin = INT64_MAX;
    std::int64_t end = 0;
    for (int r = 0; r < count_; ++r) {
      const Extent& e = extents_[r];
      live_[r] = e.first_segment <= segment && segment < e.end_segment;
      if (!live_[r]) continue;
      const std::int64_t from = e.gone / kChunk * kChunk;
      begin = from < begin ? from : begin;
      end = e.total > end ? e.total : end;
      for (int i = 0; i < width_; ++i) {
        Column& column = columns_[r * width_ + i];
        column.out = target(segment, r, i);
        column.top = -__builtin_inff();
        column.sum = 0.0f;
        __builtin_memset(column.out, 0, static_cast<std::size_t>(heads_.dim) * sizeof(float));
      }
    }
    const std::int64_t start = segment * kAttentionSegment;
    begin = begin > start ? begin : start;
    end = end < start + kAttentionSegment ? end : start + kAttentionSegment;
    if (begin >= end) return;
    locate(begin, 0);
    int now = 0;
    for (std::int64_t at = begin; at < end; at += kChunk, now = 1 - now) {
      locate(at + kChunk, 1 - now);
      run_chunk(at, now);
    }
    for (int r = 0; r < count_; ++r) {
      if (live_[r]) keep(segment, r);
    }
  }

  /// Where a segment's sums of a head go: its place among the partials, or the output itself for
  /// the first one, or a place to combine from.
  float* target(std::int64_t segment, int r, int i) {
    const std::int64_t later = segment - extents_[r].first_segment;
    if (rows_[r].partial >= 0) return partial(r, later) + (q_head_ + i) * heads_.dim;
    return later == 0 ? head_out(r, i) : later_ + (r * width_ + i) * heads_.dim;
  }

  float* partial(int r, std::int64_t later) const {
    return args_.partials + (rows_[r].partial + later) * partial_floats(args_.q_heads, heads_.dim);
  }

  void keep(std::int64_t segment, int r) {
    const std::int64_t later = segment - extents_[r].first_segment;
    for (int i = 0; i < width_; ++i) {
      const Column& column = columns_[r * width_ + i];
      self().settle(column.out);
      if (rows_[r].partial >= 0) {
        float* tops = partial(r, later) + args_.q_heads * heads_.dim;
        tops[q_head_ + i] = column.top;
        tops[args_.q_heads + q_head_ + i] = column.sum;
        continue;
      }
      Softmax& before = before_[r * width_ + i];
      if (later == 0) {
        before = {column.top, column.sum};
      } else {
        combine(before.top, before.sum, head_out(r, i), column.top, column.sum, column.out,
                heads_.dim);
      }
    }
  }

  void locate(std::int64_t begin, int which) {
    const std::int64_t left = most_in_table_ - begin;
    in_table_[which] = static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk);
    find_in_table(args_, rows_[0], begin, in_table_[which], places_[which]);
  }

  void run_chunk(std::int64_t begin, int now) {
    int lowest = kChunk;
    int highest = 0;
    int shared = 0;
    for (int r = 0; r < count_; ++r) {
      const Extent& e = extents_[r];
      const std::int64_t left = e.total - begin;
      const int count = static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk);
      const std::int64_t gone = e.gone - begin;
      const int first = static_cast<int>(gone < 0 ? 0 : gone < count ? gone : count);
      firsts_[r] = first;
      counts_[r] = count;
      if (!live_[r] || first >= count) {
        shares_[r] = Share::none;
      } else if (begin + count > rows_[r].table_positions) {
        shares_[r] = Share::own;
      } else {
        shares_[r] = first == 0 && count == kChunk ? Share::whole : Share::part;
        lowest = first < lowest ? first : lowest;
        highest = count > highest ? count : highest;
        ++shared;
      }
    }
    if (shared > 0) self().shared_rows(places_[now], lowest, highest, shared, 1 - now);
    for (int r = 0; r < count_; ++r) {
      if (shares_[r] == Share::own) place_own_row(begin, r);
    }
  }

  /// A row whose path reaches into the chunk.
  void place_own_row(std::int64_t begin, int r) {
    const AttentionRow& row = rows_[r];
    std::int64_t at[kChunk];
    const std::int64_t left = row.table_positions - begin;
    const int in_table = static_cast<int>(left < 0 ? 0 : left < counts_[r] ? left : counts_[r]);
    find_in_table(args_, row, begin, in_table, at);
    for (int i = in_table; i < counts_[r]; ++i) {
      at[i] = args_.path_base + row.path[begin + i - row.table_positions];
    }
    self().own_row(at, r);
  }

  const T* keys(int h) const {
    return static_cast<const T*>(args_.k) + (kv_head_ + h) * heads_.dim;
  }
  const T* values(int h) const {
    return static_cast<const T*>(args_.v) + (kv_head_ + h) * heads_.dim;
  }

 private:
  friend Self;
  struct Softmax {
    float top;
    float sum;
  };

  Self& self() { return static_cast<Self&>(*this); }

  const AttentionArgs& args_;
  const AttentionRow* rows_;
  std::int64_t kv_head_;  // the first
  int kv_heads_;
  int count_;
  int group_;
  int width_;            // query heads of a row
  std::int64_t q_head_;  // the first of them
  Heads heads_;
  std::int64_t most_in_table_ = 0;
  Extent extents_[kMostRows];
  bool live_[kMostRows];
  Share shares_[kMostRows];  // of the chunk at hand, as are the next two
  int firsts_[kMostRows];
  int counts_[kMostRows];
  int in_table_[2];
  std::int64_t places_[2][kChunk];
  Column columns_[kMostRows * kMaxHeadGroup];
  Softmax before_[kMostRows * kMaxHeadGroup];  // of the segments before
  alignas(64) float later_[kMaxHeadGroup * kMaxHeadDim];
};

void attention_combine(const AttentionArgs& args, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t dim = args.head_dim;
  const std::int64_t stride = partial_floats(args.q_heads, dim);
  for (std::int64_t r = row_begin; r < row_end; ++r) {
    const AttentionRow& row = args.rows[r];
    if (row.partial < 0) continue;
    const Extent e = extent_of(args, row);
    for (std::int64_t h = 0; h < args.q_heads; ++h) {
      const float* from = args.partials + row.partial * stride;
      float* out = row.out + h * dim;
      __builtin_memcpy(out, from + h * dim, static_cast<std::size_t>(dim) * sizeof(float));
      float top = from[args.q_heads * dim + h];
      float sum = from[args.q_heads * (dim + 1) + h];
      for (std::int64_t s = e.first_segment + 1; s < e.end_segment; ++s) {
        from += stride;
        combine(top, sum, out, from[args.q_heads * dim + h], from[args.q_heads * (dim + 1) + h],
                from + h * dim, dim);
      }
      finish(args, sum, out);
    }
  }
}

}  // namespace
}  // namespace specrt::cpu
