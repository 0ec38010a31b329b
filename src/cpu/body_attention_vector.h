#pragma once

// Attention with vectors: keys and values of any precision, read where they are or as floats.
// Include after body_math.h.

#include "cpu/body_attention.h"

namespace specrt::cpu {
namespace {

/// Values as they are stored, or as floats.
template <typename T>
SPECRT_INLINE void widen_vector(const T* from, std::int64_t dim, float* to) {
  for_vectors(dim, [&](std::int64_t i, std::int64_t lanes) __attribute__((always_inline)) {
    store_lanes(to + i, load_lanes(from + i, lanes), lanes);
  });
}

template <typename T>
class VectorTask : public Task<T, VectorTask<T>> {
  using Base = Task<T, VectorTask<T>>;

 public:
  using Base::Base;

 private:
  friend Base;
  using Base::args_, Base::columns_, Base::count_, Base::counts_, Base::firsts_, Base::group_,
      Base::heads_, Base::in_table_, Base::keys, Base::kv_head_, Base::kv_heads_, Base::places_,
      Base::shares_, Base::values, Base::width_;
  using typename Base::Share;

  void start() {}
  void settle(float*) {}

  void shared_rows(const std::int64_t* at, int lowest, int highest, int rows, int following) {
    // Few heads read a value about as often as widening it would.
    const bool wide = sizeof(T) < sizeof(float) && rows * group_ > kHeadsAtOnce;
    for (int h = 0; h < kv_heads_; ++h) {
      find_scales(at, lowest, highest, h);
      if (wide) {
        widen(at, lowest, highest, following, h);
        Chunk<float> chunk = {wide_k_,    wide_v_, heads_.dim, kInOrder, k_scales(),
                              v_scales(), 0,       kChunk,     nullptr,  -1};
        run_shared(chunk, h);
      } else {
        Chunk<T> chunk = chunk_of(at, h);
        chunk.next = places_[following];
        chunk.next_count = in_table_[following];
        run_shared(chunk, h);
      }
    }
  }

  Chunk<T> chunk_of(const std::int64_t* at, int h) const {
    return {keys(h), values(h), args_.kv_heads * heads_.dim, at, k_scales(), v_scales(), 0, kChunk,
            nullptr, 0};
  }

  /// Rows that find all of the chunk's positions by the block table.
  template <typename U>
  SPECRT_INLINE void run_shared(Chunk<U>& chunk, int h) {
    Column* block[kHeadsAtOnce];
    int filled = 0;
    for (int r = 0; r < count_; ++r) {
      if (shares_[r] != Share::whole) continue;
      for (int g = 0; g < group_; ++g) {
        block[filled++] = &columns_[r * width_ + h * group_ + g];
        if (filled < kHeadsAtOnce) continue;
        attend_columns(filled, heads_, chunk, block);
        filled = 0;
        chunk.next_count = -1;
      }
    }
    if (filled > 0) {
      attend_columns(filled, heads_, chunk, block);
      chunk.next_count = -1;
    }
    for (int r = 0; r < count_; ++r) {
      if (shares_[r] == Share::part) run_row(chunk, r, h);
    }
  }

  template <typename U>
  SPECRT_INLINE void run_row(Chunk<U>& chunk, int r, int h) {
    chunk.first = firsts_[r];
    chunk.count = counts_[r];
    Column* block[kHeadsAtOnce];
    for (int g = 0; g < group_; g += kHeadsAtOnce) {
      const int count = group_ - g < kHeadsAtOnce ? group_ - g : kHeadsAtOnce;
      for (int i = 0; i < count; ++i) block[i] = &columns_[r * width_ + h * group_ + g + i];
      attend_columns(count, heads_, chunk, block);
      chunk.next_count = -1;
    }
  }

  void own_row(const std::int64_t* at, int r) {
    for (int h = 0; h < kv_heads_; ++h) {
      find_scales(at, firsts_[r], counts_[r], h);
      Chunk<T> chunk = chunk_of(at, h);
      run_row(chunk, r, h);
    }
  }

  void find_scales(const std::int64_t* at, int from, int to, int h) {
    if constexpr (sizeof(T) == 1) {
      for (int i = 0; i < kChunk; ++i) {
        const bool inside = i >= from && i < to;
        const std::int64_t scale = inside ? at[i] * args_.kv_heads + kv_head_ + h : 0;
        k_scales_[i] = inside ? args_.k_scales[scale] : 0.0f;
        v_scales_[i] = inside ? args_.v_scales[scale] : 0.0f;
      }
    } else {
      (void)at;
      (void)from;
      (void)to;
      (void)h;
    }
  }

  void widen(const std::int64_t* at, int from, int to, int following, int h) {
    const std::int64_t bytes = heads_.dim * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t stride = args_.kv_heads * heads_.dim;
    const std::int64_t* next = places_[following];
    for (int i = from; i < to; ++i) {
      if (i < in_table_[following]) {
        prefetch_vector(keys(h) + next[i] * stride, bytes);
        prefetch_vector(values(h) + next[i] * stride, bytes);
      }
      widen_vector(keys(h) + at[i] * stride, heads_.dim, wide_k_ + i * heads_.dim);
      widen_vector(values(h) + at[i] * stride, heads_.dim, wide_v_ + i * heads_.dim);
    }
  }

  const float* k_scales() const { return sizeof(T) == 1 ? k_scales_ : nullptr; }
  const float* v_scales() const { return sizeof(T) == 1 ? v_scales_ : nullptr; }

  static constexpr std::int64_t kInOrder[kChunk] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                    11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                    22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

  alignas(64) float k_scales_[kChunk];
  alignas(64) float v_scales_[kChunk];
  alignas(64) float wide_k_[kChunk * kMaxHeadDim];
  alignas(64) float wide_v_[kChunk * kMaxHeadDim];
};

/// As many kv heads as a Task has room for: together they read memory from one end to the other.
SPECRT_INLINE std::int64_t heads_at_once(const AttentionArgs& args, const AttentionUnit& unit) {
  const std::int64_t group = args.q_heads / args.kv_heads;
  const std::int64_t by_sums = kMaxHeadGroup * kMaxHeadDim / (unit.rows * group * args.head_dim);
  const std::int64_t by_columns = kMaxHeadGroup / group;
  const std::int64_t most = by_sums < by_columns ? by_sums : by_columns;
  return most < 1 ? 1 : most;
}

/// Calls body(unit, first kv head, heads) over tasks [begin, end), as many heads of a unit at once
/// as heads_of(unit) says.
template <typename HeadsOf, typename Body>
SPECRT_INLINE void for_head_runs(const AttentionArgs& args, std::int64_t begin, std::int64_t end,
                                 const HeadsOf& heads_of, const Body& body) {
  for (std::int64_t task = begin; task < end;) {
    const AttentionUnit& unit = args.units[task / args.kv_heads];
    const std::int64_t kv_head = task % args.kv_heads;
    std::int64_t heads = heads_of(unit);
    heads = heads < args.kv_heads - kv_head ? heads : args.kv_heads - kv_head;
    heads = heads < end - task ? heads : end - task;
    body(unit, kv_head, static_cast<int>(heads));
    task += heads;
  }
}

template <typename T>
void attend(const AttentionArgs& args, std::int64_t task_begin, std::int64_t task_end) {
  for_head_runs(
      args, task_begin, task_end,
      [&](const AttentionUnit& unit) { return heads_at_once(args, unit); },
      [&](const AttentionUnit& unit, std::int64_t kv_head, int heads) {
        VectorTask<T>(args, unit, kv_head, heads).run(unit.segment);
      });
}

void attention(const AttentionArgs& args, std::int64_t task_begin, std::int64_t task_end) {
  switch (args.kv_dtype) {
    case KvDType::f32:
      attend<float>(args, task_begin, task_end);
      break;
    case KvDType::bf16:
      attend<std::uint16_t>(args, task_begin, task_end);
      break;
    case KvDType::i8:
      attend<std::int8_t>(args, task_begin, task_end);
      break;
    case KvDType::f16:  // refused before (check_device)
      break;
  }
}

}  // namespace
}  // namespace specrt::cpu
