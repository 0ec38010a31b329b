#pragma once

// From rows of logits to tokens, in three steps: what each chunk of the vocabulary has (the highest
// logit, then weights), and what follows for the row. Sums are of whole numbers, weights counted in
// 2^-40, so that they are the same in any order; ties go to the lower id. What top_k, top_p and
// min_p leave is what decode/filter.h says.

#include "kernels/race.h"
#include "kernels/sampling_state.h"

namespace specrt::cuda {

inline constexpr std::int64_t kVocabChunk = 4096;
inline constexpr int kFloors = 4;

/// Floors below the highest logit, in units of the temperature. Nothing below the last has weight.
SPECRT_KERNEL float floor_below(int level) {
  return level == 0 ? 2.0f : level == 1 ? 6.0f : level == 2 ? 20.0f : 88.0f;
}

SPECRT_KERNEL std::uint64_t counted(float weight) {
  return static_cast<std::uint64_t>(weight * 0x1p40f);
}

struct ChunkTop {
  float raw = 0.0f;      ///< of the raw logits
  float top = 0.0f;      ///< of the processed ones
  std::int32_t id = 0;   ///< the first that has it
  std::int32_t bad = 0;  ///< a NaN or +inf among the raw (1) or processed (2) ones
};

struct ChunkShare {
  std::uint64_t raw_sum = 0;  ///< of exp(x - max) over the raw logits
  std::uint64_t sums[kFloors] = {};
  std::int32_t counts[kFloors] = {};
  double key = 0.0;  ///< the race over the chunk, of rows without filters
  std::int32_t id = -1;
};

struct ChooseArgs {
  const float* logits = nullptr;     ///< [rows, stride]
  const float* processed = nullptr;  ///< [rows, stride]: of sequences that are not neutral
  std::int64_t stride = 0;
  std::int64_t vocab = 0;
  std::int64_t chunks = 0;  ///< ceil(vocab / kVocabChunk)
  const LogitRow* rows = nullptr;
  const SamplingState* states = nullptr;
  ChunkTop* tops = nullptr;         ///< [rows, chunks]
  ChunkShare* shares = nullptr;     ///< [rows, chunks]
  std::int32_t* found = nullptr;    ///< [rows, vocab], for rows with filters
  std::int32_t* choices = nullptr;  ///< [rows]: the token, or kNotFinite, kAllMasked
  float* logprobs = nullptr;        ///< [rows]: its raw log-softmax
};

SPECRT_KERNEL const float* logits_of(const ChooseArgs& args, std::int64_t row) {
  const bool neutral = args.states[args.rows[row].sequence].neutral;
  return (neutral ? args.logits : args.processed) + row * args.stride;
}

SPECRT_KERNEL bool filters(const SamplingState& state, std::int64_t vocab) {
  return (state.top_k > 0 && state.top_k < vocab) || state.top_p < 1.0 || state.min_p > 0.0;
}

/// Every chunk's highest logit. Grid: chunks by rows.
struct FindTops {
  static constexpr int kThreads = 256;
  using Args = ChooseArgs;
  struct Shared {
    ChunkTop warps[kThreads / simt::kWarp];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    if (args.rows[block.y()].sequence < 0) return;
    const float* raw = args.logits + block.y() * args.stride;
    const float* x = logits_of(args, block.y());
    const std::int64_t begin = block.x() * kVocabChunk;
    const std::int64_t end = begin + kVocabChunk < args.vocab ? begin + kVocabChunk : args.vocab;
    ChunkTop best{-infinity(), -infinity(), static_cast<std::int32_t>(begin), 0};
    for (std::int64_t i = begin + block.thread(); i < end; i += kThreads) {
      best.raw = larger(best.raw, raw[i]);
      if (!(raw[i] < infinity())) best.bad |= 1;
      if (!(x[i] < infinity())) best.bad |= 2;
      if (x[i] > best.top) {
        best.top = x[i];
        best.id = static_cast<std::int32_t>(i);
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const ChunkTop other{block.shuffle_xor(best.raw, mask), block.shuffle_xor(best.top, mask),
                           block.shuffle_xor(best.id, mask), block.shuffle_xor(best.bad, mask)};
      take(best, other);
    }
    if (block.thread() % simt::kWarp == 0) shared.warps[block.thread() / simt::kWarp] = best;
    block.sync();
    if (block.thread() != 0) return;
    for (int warp = 1; warp < kThreads / simt::kWarp; ++warp) take(best, shared.warps[warp]);
    args.tops[block.y() * args.chunks + block.x()] = best;
  }

  SPECRT_KERNEL static void take(ChunkTop& best, const ChunkTop& other) {
    best.raw = larger(best.raw, other.raw);
    best.bad |= other.bad;
    if (other.top > best.top || (other.top == best.top && other.id < best.id)) {
      best.top = other.top;
      best.id = other.id;
    }
  }
};

/// A row's highest logits, out of its chunks'.
SPECRT_KERNEL ChunkTop row_top(const ChooseArgs& args, std::int64_t row) {
  ChunkTop best = args.tops[row * args.chunks];
  for (std::int64_t i = 1; i < args.chunks; ++i) {
    FindTops::take(best, args.tops[row * args.chunks + i]);
  }
  return best;
}

/// Every chunk's weights, and the race where nothing is filtered. Grid: chunks by rows.
struct Weigh {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = ChooseArgs;
  struct Shared {
    ChunkShare warps[kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LogitRow row = args.rows[block.y()];
    if (row.sequence < 0) return;
    const SamplingState& state = args.states[row.sequence];
    const float* raw = args.logits + block.y() * args.stride;
    const float* x = logits_of(args, block.y());
    const ChunkTop top = row_top(args, block.y());
    const bool sampled = state.temperature > 0.0f;
    const bool filtered = filters(state, args.vocab);
    const std::int64_t begin = block.x() * kVocabChunk;
    const std::int64_t end = begin + kVocabChunk < args.vocab ? begin + kVocabChunk : args.vocab;
    float floors[kFloors];
    for (int f = 0; f < kFloors; ++f) floors[f] = top.top - floor_below(f) * state.temperature;
    ChunkShare own;
    RaceBest best;
    // Four neighbours share a block of noise.
    for (std::int64_t first = begin + 4 * block.thread(); first < end; first += 4 * kThreads) {
      const Noise noise(state, row.position, sampled && !filtered, first);
      for (std::int64_t i = first; i < first + 4 && i < end; ++i) {
        own.raw_sum += counted(exponential(raw[i] - top.raw));
        if (!sampled) continue;
        const float weight = exponential((x[i] - top.top) * state.inv_temperature);
        if (filtered) {
          SPECRT_UNROLL
          for (int f = 0; f < kFloors; ++f) {
            if (!(x[i] >= floors[f])) continue;
            ++own.counts[f];
            own.sums[f] += counted(weight);
          }
        } else {
          const auto id = static_cast<std::int32_t>(i);
          best.enter(noise.words[i - first], weight, id);
        }
      }
    }
    own.raw_sum = simt::warp_sum(block, own.raw_sum);
    for (int f = 0; f < kFloors; ++f) {
      own.sums[f] = simt::warp_sum(block, own.sums[f]);
      own.counts[f] = simt::warp_sum(block, own.counts[f]);
    }
    best = warp_best(block, best);
    own.key = best.key;
    own.id = best.id;
    if (block.thread() % simt::kWarp == 0) shared.warps[block.thread() / simt::kWarp] = own;
    block.sync();
    if (block.thread() != 0) return;
    for (int warp = 1; warp < kWarps; ++warp) take(own, shared.warps[warp]);
    args.shares[block.y() * args.chunks + block.x()] = own;
  }

  SPECRT_KERNEL static void take(ChunkShare& share, const ChunkShare& other) {
    share.raw_sum += other.raw_sum;
    for (int f = 0; f < kFloors; ++f) {
      share.sums[f] += other.sums[f];
      share.counts[f] += other.counts[f];
    }
    const RaceBest best{share.key, share.id};
    if (best.beaten_by(other.key, other.id)) {
      share.key = other.key;
      share.id = other.id;
    }
  }
};

/// The row's token. Grid: rows.
struct Choose {
  static constexpr int kThreads = 512;
  static constexpr int kWarps = kThreads / simt::kWarp;
  static constexpr int kParts = 8;  ///< into which a search cuts what is left
  using Args = ChooseArgs;
  struct Shared {
    std::uint64_t sums[kWarps][kParts];
    std::int32_t offsets[kWarps];
    double keys[kWarps];
    std::int32_t ids[kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LogitRow row = args.rows[block.x()];
    if (row.sequence < 0) return;
    const SamplingState& state = args.states[row.sequence];
    const ChunkTop top = row_top(args, block.x());
    std::int32_t token = top.id;
    if ((top.bad & 1) != 0 || top.raw == -infinity()) {
      token = kNotFinite;
    } else if ((top.bad & 2) != 0 || top.top == -infinity()) {
      token = kAllMasked;
    }
    ChunkShare share = args.shares[block.x() * args.chunks];
    for (std::int64_t i = 1; i < args.chunks; ++i) {
      Weigh::take(share, args.shares[block.x() * args.chunks + i]);
    }
    if (token >= 0 && state.temperature > 0.0f) {
      token = filters(state, args.vocab)
                  ? Filtered<Block>(block, shared, args, row, state, top.top, share).choose()
                  : share.id;
    }
    if (block.thread() != 0) return;
    args.choices[block.x()] = token;
    float logprob = 0.0f;
    if (token >= 0) {
      const double raw = args.logits[block.x() * args.stride + token];
      logprob = static_cast<float>(raw - (double{top.raw} + log(share.raw_sum * 0x1p-40)));
    }
    args.logprobs[block.x()] = logprob;
  }

 private:
  // What is left of a row: entries above a floor, of those equal to it the ids below a bound.
  struct Cut {
    std::uint32_t floor = 0;  // as order_of()
    std::int32_t bound = INT32_MAX;
  };

  template <class Block>
  class Filtered {
   public:
    SPECRT_KERNEL Filtered(const Block& block, Shared& shared, const Args& args,
                           const LogitRow& row, const SamplingState& state, float top,
                           const ChunkShare& share)
        : block_(block),
          shared_(shared),
          args_(args),
          row_(row),
          state_(state),
          top_(top),
          share_(share),
          x_(logits_of(args, block.x())),
          found_(args.found + block.x() * args.vocab) {}

    SPECRT_KERNEL std::int32_t choose() {
      const bool by_count = state_.top_k > 0 && state_.top_k < args_.vocab;
      const bool by_sum = state_.top_p < 1.0;
      // The highest floor with enough above it for the first filter; the others only take away.
      int level = 0;
      for (; level < kFloors - 1; ++level) {
        if (by_count ? share_.counts[level] >= state_.top_k
            : by_sum ? share_.sums[level] >= wanted(share_.sums[kFloors - 1])
                     : exponential(-floor_below(level)) * 1.0001f < state_.min_p) {
          break;
        }
      }
      collect(top_ - floor_below(level) * state_.temperature);
      if (by_count) cut_ = find(false, static_cast<std::uint64_t>(state_.top_k));
      if (by_sum) {
        std::uint64_t sum = share_.sums[kFloors - 1];
        if (by_count) {
          Measure by;
          by.by_weight = true;
          sum = worth_from(by, 0);
        }
        cut_ = find(true, wanted(sum));
      }
      return race();
    }

   private:
    SPECRT_KERNEL std::uint64_t wanted(std::uint64_t sum) const {
      const double share = static_cast<double>(sum) * state_.top_p;
      const auto whole = static_cast<std::uint64_t>(share);
      const std::uint64_t up = static_cast<double>(whole) < share ? whole + 1 : whole;
      return up > sum ? sum : up < 1 ? 1 : up;
    }

    SPECRT_KERNEL float weight(float x) const {
      return exponential((x - top_) * state_.inv_temperature);
    }

    // The ids of entries that are not below the floor, in some order.
    SPECRT_KERNEL void collect(float floor) {
      const int thread = block_.thread();
      const int lane = thread % simt::kWarp;
      std::int32_t count = 0;
      for (std::int64_t i = thread; i < args_.vocab; i += kThreads) count += x_[i] >= floor ? 1 : 0;
      std::int32_t before = count;  // those of this thread and the lanes before it
      for (int distance = 1; distance < simt::kWarp; distance *= 2) {
        const std::int32_t other =
            block_.shuffle(before, lane >= distance ? lane - distance : lane);
        if (lane >= distance) before += other;
      }
      if (lane == simt::kWarp - 1) shared_.offsets[thread / simt::kWarp] = before;
      block_.sync();
      std::int32_t at = before - count;
      size_ = 0;
      for (int warp = 0; warp < kWarps; ++warp) {
        if (warp < thread / simt::kWarp) at += shared_.offsets[warp];
        size_ += shared_.offsets[warp];
      }
      for (std::int64_t i = thread; i < args_.vocab; i += kThreads) {
        if (x_[i] >= floor) found_[at++] = static_cast<std::int32_t>(i);
      }
      block_.sync();
    }

    SPECRT_KERNEL bool left(std::uint32_t order, std::int32_t id) const {
      return order > cut_.floor || (order == cut_.floor && id < cut_.bound);
    }

    // By what entries are found, and what each is worth: a weight, or 1.
    struct Measure {
      bool by_weight = false;
      bool by_tie = false;  ///< those at `floor` alone, the lower id the higher place
      std::uint32_t floor = 0;
    };

    SPECRT_KERNEL std::uint64_t place(const Measure& by, std::uint32_t order,
                                      std::int32_t id) const {
      if (!by.by_tie) return order;
      return order == by.floor ? static_cast<std::uint64_t>(args_.vocab - id) : 0;
    }

    // worth[p]: what is left at low + p * step and above.
    SPECRT_KERNEL_CALL void measure(const Measure& by, std::uint64_t low, std::uint64_t step,
                                    std::uint64_t (&worth)[kParts]) {
      SPECRT_UNROLL
      for (int p = 0; p < kParts; ++p) worth[p] = 0;
      for (std::int32_t i = block_.thread(); i < size_; i += kThreads) {
        const std::int32_t id = found_[i];
        const float x = x_[id];
        const std::uint32_t order = order_of(x);
        if (!left(order, id)) continue;
        const std::uint64_t value = by.by_weight ? counted(weight(x)) : 1;
        const std::uint64_t at = place(by, order, id);
        SPECRT_UNROLL
        for (int p = 0; p < kParts; ++p) worth[p] += at >= low + p * step ? value : 0;
      }
      block_.sync();  // nobody reads the sums before
      SPECRT_UNROLL
      for (int p = 0; p < kParts; ++p) {
        worth[p] = simt::warp_sum(block_, worth[p]);
        if (block_.thread() % simt::kWarp == 0) {
          shared_.sums[block_.thread() / simt::kWarp][p] = worth[p];
        }
      }
      block_.sync();
      SPECRT_UNROLL
      for (int p = 0; p < kParts; ++p) {
        worth[p] = 0;
        for (int warp = 0; warp < kWarps; ++warp) worth[p] += shared_.sums[warp][p];
      }
    }

    // The highest place below `end` with at least `wanted` from it up; 0 where all together are
    // less.
    SPECRT_KERNEL_CALL std::uint64_t search(const Measure& by, std::uint64_t end,
                                            std::uint64_t wanted) {
      std::uint64_t low = 0;
      std::uint64_t high = end;
      while (high - low > 1) {
        const std::uint64_t step = (high - low + kParts - 1) / kParts;
        std::uint64_t worth[kParts];
        measure(by, low, step, worth);
        int last = 0;  // the last part with enough; what is worth enough is found at the first ones
        SPECRT_UNROLL
        for (int p = 1; p < kParts; ++p) {
          if (worth[p] >= wanted) last = p;
        }
        low += last * step;
        high = low + step < high ? low + step : high;
      }
      return low;
    }

    SPECRT_KERNEL std::uint64_t worth_from(const Measure& by, std::uint64_t from) {
      std::uint64_t worth[kParts];
      measure(by, from, 0, worth);
      return worth[0];
    }

    // A head of the ranking, as short as can be, that is worth `wanted`.
    SPECRT_KERNEL_CALL Cut find(bool by_weight, std::uint64_t wanted) {
      Measure by;
      by.by_weight = by_weight;
      Cut cut;
      cut.floor = static_cast<std::uint32_t>(search(by, std::uint64_t{order_of(top_)} + 1, wanted));
      if (cut.floor == cut_.floor) cut.bound = cut_.bound;
      const std::uint64_t above = worth_from(by, std::uint64_t{cut.floor} + 1);
      const std::uint64_t each = by_weight ? counted(weight(at_order(cut.floor))) : 1;
      if (above >= wanted || each == 0) return cut;
      // Of equals the lower ids, as many as are needed.
      const std::uint64_t ties = (wanted - above + each - 1) / each;
      by.by_weight = false;
      by.by_tie = true;
      by.floor = cut.floor;
      const std::uint64_t end = static_cast<std::uint64_t>(args_.vocab) + 1;
      const auto bound = static_cast<std::int32_t>(end - search(by, end, ties));
      if (bound < cut.bound) cut.bound = bound;
      return cut;
    }

    SPECRT_KERNEL std::int32_t race() {
      RaceBest best;
      for (std::int32_t i = block_.thread(); i < size_; i += kThreads) {
        const std::int32_t id = found_[i];
        const float x = x_[id];
        const float w = weight(x);
        if (!left(order_of(x), id) || !(w >= state_.min_p)) continue;
        best.enter(choice_noise(state_, row_.position, id), w, id);
      }
      best = warp_best(block_, best);
      if (block_.thread() % simt::kWarp == 0) {
        shared_.keys[block_.thread() / simt::kWarp] = best.key;
        shared_.ids[block_.thread() / simt::kWarp] = best.id;
      }
      block_.sync();
      for (int warp = 0; warp < kWarps; ++warp) {
        if (!best.beaten_by(shared_.keys[warp], shared_.ids[warp])) continue;
        best.key = shared_.keys[warp];
        best.id = shared_.ids[warp];
      }
      return best.id;
    }

    const Block& block_;
    Shared& shared_;
    const Args& args_;
    const LogitRow& row_;
    const SamplingState& state_;
    const float top_;
    const ChunkShare& share_;
    const float* x_;
    std::int32_t* found_;
    std::int32_t size_ = 0;
    Cut cut_;
  };
};

}  // namespace specrt::cuda
