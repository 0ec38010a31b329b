#pragma once

// Tree attention over paged keys and values. As on the CPU (cpu/body_attention.h), positions are
// reduced by chunks of absolute position, chunks by segments, segments in order; a row finds
// positions up to the last committed one by its block table and its own draft path by slots, and
// sees the same whether a position was committed or is on its path. Query heads of all rows that
// share a key-value head stand side by side in tiles of the matrix unit, so that a chunk is read
// once for all of them; a chunk that reaches into a row's path is brought in for that row alone.
//
// A tile's row never meets another's, so a row's result does not depend on its neighbours: what is
// not its own has weight 0, and accumulators of rows that a chunk does not concern stay as they
// are.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

inline constexpr int kChunk = 64;
inline constexpr int kSegment = 512;
/// Query heads, of all rows of a unit, that a block takes.
inline constexpr int kTile = 16;
inline constexpr int kTiles = 4;

/// As cpu::AttentionRow, in device memory.
struct AttentionRow {
  std::int32_t table = 0;  ///< where its block table begins in AttentionArgs::tables
  std::int32_t table_positions = 0;
  std::int32_t path = 0;  ///< where its path begins in AttentionArgs::paths
  std::int32_t path_length = 0;
};

/// Rows [first_row, first_row + rows) of one block table; at most attention_rows(group).
struct AttentionUnit {
  std::int32_t first_row = 0;
  std::int32_t rows = 0;
};

/// Most rows of a unit whose rows have `group` query heads to a key-value head; 0: too many heads.
constexpr std::int64_t attention_rows(std::int64_t group) {
  return group <= kTile ? kTiles * (kTile / group) : kTiles / ((group + kTile - 1) / kTile);
}

struct AttentionArgs {
  const float* q = nullptr;  ///< [rows, q_stride]: q_heads of head_dim, rotated
  std::int64_t q_stride = 0;
  void* out = nullptr;  ///< [rows, out_stride] of the kernel's type
  std::int64_t out_stride = 0;
  const void* k = nullptr;  ///< [slots, kv_heads, head_dim] of the kernel's type
  const void* v = nullptr;
  const AttentionRow* rows = nullptr;
  const AttentionUnit* units = nullptr;
  const std::int32_t* tables = nullptr;
  const std::int32_t* paths = nullptr;  ///< slots less path_base
  std::int64_t path_base = 0;
  std::int32_t block_shift = 0;  ///< blocks hold 1 << block_shift positions
  std::int32_t q_heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;  ///< a multiple of 8, at most the kernel's
  float scale = 0.0f;
  float softcap = 0.0f;        ///< > 0: scores become softcap * tanh(score / softcap)
  std::int32_t window = 0;     ///< > 0: only the last `window` positions, the token itself included
  std::int32_t segments = 0;   ///< most segments of any row; grid z
  float* partials = nullptr;   ///< [rows, segments, q_heads, head_dim + 2]: sums, top, weight
  std::int64_t first_row = 0;  ///< of the units; partials begin with it
};

/// The positions of a row: [gone, total), which lie in segments [first, end).
struct Extent {
  std::int32_t total;
  std::int32_t gone;
  std::int32_t first;
  std::int32_t end;
};

SPECRT_KERNEL Extent extent_of(const AttentionArgs& args, const AttentionRow& row) {
  Extent e;
  e.total = row.table_positions + row.path_length;
  e.gone = args.window > 0 && e.total > args.window ? e.total - args.window : 0;
  e.first = e.gone / kSegment;
  e.end = (e.total + kSegment - 1) / kSegment;
  return e;
}

/// Grid: units by kv_heads by segments. kDim: 64, 128 or 256, at least head_dim.
template <typename T, int kDim>
struct Attention {
  // Warps of a tile: sums of 256 columns are more than the registers of one.
  static constexpr int kShares = kDim > 128 ? 2 : 1;
  static constexpr int kColumns = kDim / kShares;
  static constexpr int kThreads = kShares * kTiles * simt::kWarp;
  static constexpr int kStride = kDim + 8;  // so that rows start in different banks
  using Args = AttentionArgs;
  struct Shared {
    alignas(16) T q[kTiles * kTile][kStride];
    alignas(16) T k[kChunk][kStride];
    alignas(16) T v[kChunk][kStride];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    Worker<Block>(block, shared, args).run();
  }

 private:
  template <class Block>
  class Worker {
   public:
    SPECRT_KERNEL Worker(const Block& block, Shared& shared, const Args& args)
        : block_(block),
          shared_(shared),
          args_(args),
          unit_(args.units[block.x()]),
          rows_(args.rows + unit_.first_row),
          tile_(block.thread() / simt::kWarp % kTiles),
          first_column_(block.thread() / simt::kWarp / kTiles * kColumns),
          g_(block.thread() % simt::kWarp / 4),
          c_(block.thread() % 4) {}

    SPECRT_KERNEL void run() {
      if (unit_.rows == 0) return;  // padding of a captured graph
      int first_segment = INT32_MAX;
      int in_table = 0;
      for (int r = 0; r < unit_.rows; ++r) {
        const Extent e = extent_of(args_, row_of(r));
        first_segment = e.first < first_segment ? e.first : first_segment;
        in_table = row_of(r).table_positions > in_table ? row_of(r).table_positions : in_table;
      }
      segment_ = first_segment + static_cast<int>(block_.z());
      const int start = segment_ * kSegment;
      int gone = INT32_MAX;
      int end = 0;
      for (int r = 0; r < unit_.rows; ++r) {
        const Extent e = extent_of(args_, row_of(r));
        if (e.first > segment_ || e.end <= segment_) continue;
        gone = e.gone < gone ? e.gone : gone;
        end = e.total > end ? e.total : end;
      }
      const int begin = gone / kChunk * kChunk > start ? gone / kChunk * kChunk : start;
      end = end < start + kSegment ? end : start + kSegment;
      if (begin >= end) return;

      SPECRT_UNROLL
      for (int i = 0; i < 2; ++i) column(i);
      load_queries();
      SPECRT_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        SPECRT_UNROLL
        for (int i = 0; i < 4; ++i) acc_[n][i] = 0.0f;
      }
      for (int at = begin; at < end; at += kChunk) {
        bool shared_rows = false;
        for (int r = 0; r < unit_.rows; ++r) shared_rows |= share_of(r, at) == Share::shared;
        // First all rows that see the chunk as it lies in the block table, then one by one those
        // whose path it reaches.
        for (int r = -1; r < unit_.rows; ++r) {
          if (r < 0 ? !shared_rows : share_of(r, at) != Share::own) continue;
          const AttentionRow& row = row_of(r < 0 ? 0 : r);
          const Extent e = extent_of(args_, row);
          load_chunk(row, at, r < 0 ? gone : e.gone, r < 0 ? in_table : row.table_positions,
                     r < 0 ? in_table : e.total);
          do_chunk(at, r);
        }
      }
      SPECRT_UNROLL
      for (int i = 0; i < 2; ++i) weight_[i] = quad_sum(weight_[i]);
      SPECRT_UNROLL
      for (int i = 0; i < 2; ++i) keep(i);
    }

   private:
    enum class Share : std::uint8_t { none, shared, own };

    // Which row stands in this thread's tile row g_ + 8 i.
    SPECRT_KERNEL void column(int i) {
      const int group = args_.q_heads / args_.kv_heads;
      const int at = g_ + 8 * i;
      int row = 0;
      bool there = true;
      if (group <= kTile) {
        row = tile_ * (kTile / group) + at / group;
        there = at / group < kTile / group;
      } else {
        row = tile_ / ((group + kTile - 1) / kTile);
        there = head(i) < group;
      }
      there = there && row < unit_.rows;
      row_[i] = there ? row : -1;
      top_[i] = -infinity();
      weight_[i] = 0.0f;
    }

    // And which head of the group: worked out where it is asked for, since registers are few.
    SPECRT_KERNEL int head(int i) const {
      const int group = args_.q_heads / args_.kv_heads;
      const int at = g_ + 8 * i;
      if (group <= kTile) return at % group;
      return tile_ % ((group + kTile - 1) / kTile) * kTile + at;
    }
    SPECRT_KERNEL std::int64_t query_head(int i) const {
      return block_.y() * (args_.q_heads / args_.kv_heads) + head(i);
    }

    SPECRT_KERNEL const AttentionRow& row_of(int r) const { return rows_[r]; }

    // How row r sees the chunk at `begin`.
    SPECRT_KERNEL Share share_of(int r, int begin) const {
      const Extent e = extent_of(args_, row_of(r));
      const int end = e.total < begin + kChunk ? e.total : begin + kChunk;
      if (e.first > segment_ || e.end <= segment_ || end <= begin || e.gone >= end) {
        return Share::none;
      }
      return end > row_of(r).table_positions ? Share::own : Share::shared;
    }

    SPECRT_KERNEL void load_queries() {
      // Rounded to the cache's type, rows of no one to zero.
      SPECRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        T* to = shared_.q[tile_ * kTile + g_ + 8 * i];
        const float* from = nullptr;
        if (row_[i] >= 0) {
          from = args_.q + (unit_.first_row + row_[i]) * args_.q_stride +
                 query_head(i) * args_.head_dim;
        }
        for (int d = first_column_ + c_; d < first_column_ + kColumns; d += 4) {
          to[d] = from_float<T>(from != nullptr && d < args_.head_dim ? from[d] : 0.0f);
        }
      }
    }

    // Positions [begin, begin + kChunk) of a row; zeros before `from`, where a window's blocks may
    // be gone, and from `end` on.
    SPECRT_KERNEL void load_chunk(const AttentionRow& row, int begin, int from, int in_table,
                                  int end) {
      block_.sync();  // all have done with the chunk before
      load_plane(args_.k, shared_.k, row, begin, from, in_table, end);
      block_.copy_commit();
      load_plane(args_.v, shared_.v, row, begin, from, in_table, end);
      block_.copy_commit();
    }

    SPECRT_KERNEL void load_plane(const void* plane, T (&to)[kChunk][kStride],
                                  const AttentionRow& row, int begin, int from, int in_table,
                                  int end) {
      constexpr int kPieces = kDim / 8;
      const std::int32_t* table = args_.tables + row.table;
      const std::int32_t* path = args_.paths + row.path;
      for (int p = block_.thread(); p < kChunk * kPieces; p += kThreads) {
        const int position = begin + p / kPieces;
        const int d = p % kPieces * 8;
        std::int64_t slot = 0;
        if (position < from) {
          slot = 0;
        } else if (position < in_table) {
          const int inside = position & ((1 << args_.block_shift) - 1);
          slot = (std::int64_t{table[position >> args_.block_shift]} << args_.block_shift) + inside;
        } else if (position < end) {
          slot = args_.path_base + path[position - in_table];
        }
        const bool there = position >= from && position < end && d < args_.head_dim;
        const T* source = static_cast<const T*>(plane) +
                          (slot * args_.kv_heads + block_.y()) * args_.head_dim + (there ? d : 0);
        block_.copy_async(&to[p / kPieces][d], source, there ? 16 : 0);
      }
    }

    // Scores, running softmax and weighted sums of one chunk; `own` is the only row concerned, or
    // -1 for all that see it as it lies in the block table.
    SPECRT_KERNEL void do_chunk(int begin, int own) {
      block_.template copy_wait<1>();
      block_.sync();
      float scores[kChunk / 8][4];
      score(scores);

      bool mine[2];
      float rescale[2];
      SPECRT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = row_[i];
        mine[i] = r >= 0 && (own < 0 ? share_of(r, begin) == Share::shared : r == own);
        const Extent e = r >= 0 ? extent_of(args_, row_of(r)) : Extent{0, 0, 0, 0};
        float top = -infinity();
        SPECRT_UNROLL
        for (int n = 0; n < kChunk / 8; ++n) {
          SPECRT_UNROLL
          for (int j = 0; j < 2; ++j) {
            const int position = begin + 8 * n + 2 * c_ + j;
            float& s = scores[n][2 * i + j];
            s *= args_.scale;
            if (args_.softcap > 0.0f) s = hyperbolic_tangent(s / args_.softcap) * args_.softcap;
            if (!mine[i] || position < e.gone || position >= e.total) s = -infinity();
            top = larger(top, s);
          }
        }
        top = larger(top, block_.shuffle_xor(top, 1));
        top = larger(top, block_.shuffle_xor(top, 2));
        top = larger(top_[i], top);
        rescale[i] = mine[i] ? exponential(top_[i] - top) : 1.0f;
        float sum = 0.0f;
        SPECRT_UNROLL
        for (int n = 0; n < kChunk / 8; ++n) {
          SPECRT_UNROLL
          for (int j = 0; j < 2; ++j) {
            float& s = scores[n][2 * i + j];
            s = mine[i] ? simt::rounded<T>(exponential(s - top)) : 0.0f;
            sum += s;
          }
        }
        if (mine[i]) {
          top_[i] = top;
          weight_[i] = fused(weight_[i], rescale[i], sum);
        }
      }

      block_.template copy_wait<0>();
      block_.sync();
      weigh(scores, rescale, mine);
    }

    // scores[n] = q . k of positions 8 n to 8 n + 7. Which d meets which place of the matrix unit's
    // k is free, if q and k agree: lane c takes 16 neighbours of each 64, four a step.
    SPECRT_KERNEL void score(float (&scores)[kChunk / 8][4]) {
      SPECRT_UNROLL
      for (int n = 0; n < kChunk / 8; ++n) {
        SPECRT_UNROLL
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
      }
      SPECRT_UNROLL
      for (int d = 0; d < kDim; d += 64) {
        Words q[2][2];
        SPECRT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const T* row = shared_.q[tile_ * kTile + g_ + 8 * i] + d + 16 * c_;
          q[i][0] = words(row);
          q[i][1] = words(row + 8);
        }
        SPECRT_UNROLL
        for (int n = 0; n < kChunk / 8; ++n) {
          const T* row = shared_.k[8 * n + g_] + d + 16 * c_;
          const Words k[2] = {words(row), words(row + 8)};
          SPECRT_UNROLL
          for (int s = 0; s < 4; ++s) {
            const int at = s % 2 * 2;
            const std::uint32_t a[4] = {q[0][s / 2].w[at], q[1][s / 2].w[at], q[0][s / 2].w[at + 1],
                                        q[1][s / 2].w[at + 1]};
            const std::uint32_t b[2] = {k[s / 2].w[at], k[s / 2].w[at + 1]};
            block_.template mma<T>(scores[n], a, b);
          }
        }
      }
    }

    SPECRT_KERNEL void weigh(const float (&weights)[kChunk / 8][4], const float (&rescale)[2],
                             const bool (&mine)[2]) {
      const int lane = block_.thread() % simt::kWarp;
      std::uint32_t a[kChunk / 16][4];
      SPECRT_UNROLL
      for (int t = 0; t < kChunk / 16; ++t) {
        SPECRT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* pair = weights[2 * t + i / 2] + i % 2 * 2;
          a[t][i] = simt::pack2<T>(pair[0], pair[1]);
        }
      }
      SPECRT_UNROLL
      for (int n = 0; n < kColumns / 16; ++n) {
        float sums[2][4];
        SPECRT_UNROLL
        for (int i = 0; i < 8; ++i) {
          // Adding 0 makes -0 into 0, so that a position of weight 0 changes nothing.
          sums[i / 4][i % 4] = acc_[2 * n + i / 4][i % 4] * rescale[i % 4 / 2] + 0.0f;
        }
        SPECRT_UNROLL
        for (int t = 0; t < kChunk / 16; ++t) {
          std::uint32_t v[4];
          block_.load_transposed(
              v, &shared_.v[16 * t + lane % 16][first_column_ + 16 * n + lane / 16 * 8]);
          const std::uint32_t left[2] = {v[0], v[1]};
          const std::uint32_t right[2] = {v[2], v[3]};
          block_.template mma<T>(sums[0], a[t], left);
          block_.template mma<T>(sums[1], a[t], right);
        }
        SPECRT_UNROLL
        for (int i = 0; i < 8; ++i) {
          float& kept = acc_[2 * n + i / 4][i % 4];
          kept = mine[i % 4 / 2] ? sums[i / 4][i % 4] : kept;
        }
      }
    }

    SPECRT_KERNEL float quad_sum(float x) const {
      x += block_.shuffle_xor(x, 1);
      return x + block_.shuffle_xor(x, 2);
    }

    // A segment's result: the row's, where it has no other.
    SPECRT_KERNEL void keep(int i) {
      if (row_[i] < 0) return;
      const Extent e = extent_of(args_, row_of(row_[i]));
      if (e.first > segment_ || e.end <= segment_) return;
      const std::int64_t row = unit_.first_row + row_[i];
      const std::int64_t head = query_head(i);
      const bool alone = e.end - e.first == 1;
      T* out = static_cast<T*>(args_.out) + row * args_.out_stride + head * args_.head_dim;
      float* partial =
          args_.partials +
          (((row - args_.first_row) * args_.segments + segment_ - e.first) * args_.q_heads + head) *
              (args_.head_dim + 2);
      SPECRT_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        SPECRT_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int d = first_column_ + 8 * n + 2 * c_ + j;
          if (d >= args_.head_dim) continue;
          const float value = acc_[n][2 * i + j];
          if (alone) {
            out[d] = from_float<T>(value * (1.0f / weight_[i]));
          } else {
            partial[d] = value;
          }
        }
      }
      if (alone || c_ != 0 || first_column_ != 0) return;
      partial[args_.head_dim] = top_[i];
      partial[args_.head_dim + 1] = weight_[i];
    }

    struct alignas(16) Words {
      std::uint32_t w[4];
    };
    SPECRT_KERNEL static Words words(const T* from) {
      return *reinterpret_cast<const Words*>(from);
    }

    const Block& block_;
    Shared& shared_;
    const Args& args_;
    const AttentionUnit unit_;
    const AttentionRow* rows_;
    const int tile_;
    const int first_column_;  // of this warp's sums; scores are made by each
    const int g_;             // of the matrix unit's fragments, as is c_
    const int c_;
    int segment_ = 0;
    int row_[2];  // of the unit, or -1
    float top_[2];
    float weight_[2];  // this thread's part of a row's sum of weights
    float acc_[kColumns / 8][4];
  };
};

/// Combines the segments of rows that have several. Grid: rows, from first_row on, by q_heads.
template <typename T>
struct AttentionCombine {
  static constexpr int kThreads = 64;
  using Args = AttentionArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t row = args.first_row + block.x();
    const Extent e = extent_of(args, args.rows[row]);
    if (e.end - e.first < 2) return;
    const std::int64_t stride = args.head_dim + 2;
    const float* first =
        args.partials + (block.x() * args.segments * args.q_heads + block.y()) * stride;
    T* out = static_cast<T*>(args.out) + row * args.out_stride + block.y() * args.head_dim;
    for (int d = block.thread(); d < args.head_dim; d += kThreads) {
      const float* from = first;
      float value = from[d];
      float top = from[args.head_dim];
      float weight = from[args.head_dim + 1];
      for (int s = 1; s < e.end - e.first; ++s) {
        from += args.q_heads * stride;
        const float later = from[args.head_dim];
        const float new_top = larger(top, later);
        const float before = exponential(top - new_top);
        const float after = exponential(later - new_top);
        top = new_top;
        weight = fused(from[args.head_dim + 1], after, weight * before);
        value = fused(from[d], after, value * before);
      }
      out[d] = from_float<T>(value * (1.0f / weight));
    }
  }
};

}  // namespace specrt::cuda
