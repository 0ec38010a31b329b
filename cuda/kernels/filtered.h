#pragma once

// What top_k, top_p and min_p leave of a row of logits, as decode/filter.h says, by one block.

#include "kernels/race.h"
#include "kernels/weigh.h"

namespace specrt::cuda {

/// What is left of a row: entries above a floor, of those equal to it the ids below a bound. min_p
/// takes away more.
struct Cut {
  std::uint32_t floor = 0;  ///< as order_of()
  std::int32_t bound = INT32_MAX;

  SPECRT_KERNEL bool keeps(std::uint32_t order, std::int32_t id) const {
    return order > floor || (order == floor && id < bound);
  }
};

struct FilteredShared {
  static constexpr int kThreads = 512;
  static constexpr int kWarps = kThreads / simt::kWarp;
  static constexpr int kParts = 8;  ///< into which a search cuts what is left
  std::uint64_t sums[kWarps][kParts];
  std::int32_t offsets[kWarps];
  double keys[kWarps];
  std::int32_t ids[kWarps];
};

template <class Block>
class Filtered {
 public:
  static constexpr int kThreads = FilteredShared::kThreads;
  static constexpr int kWarps = FilteredShared::kWarps;
  static constexpr int kParts = FilteredShared::kParts;

  /// Of args' row block.x().
  SPECRT_KERNEL Filtered(const Block& block, FilteredShared& shared, const ChooseArgs& args,
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

  /// To be called first.
  SPECRT_KERNEL Cut cut() {
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
    return cut_;
  }

  /// The token that wins among what is left.
  SPECRT_KERNEL std::int32_t race() {
    RaceBest best;
    for (std::int32_t i = block_.thread(); i < size_; i += kThreads) {
      const std::int32_t id = found_[i];
      const float x = x_[id];
      const float w = weight(x);
      if (!cut_.keeps(order_of(x), id) || !(w >= state_.min_p)) continue;
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
      const std::int32_t other = block_.shuffle(before, lane >= distance ? lane - distance : lane);
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

  // By what entries are found, and what each is worth: a weight, or 1.
  struct Measure {
    bool by_weight = false;
    bool by_tie = false;  ///< those at `floor` alone, the lower id the higher place
    std::uint32_t floor = 0;
  };

  SPECRT_KERNEL std::uint64_t place(const Measure& by, std::uint32_t order, std::int32_t id) const {
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
      if (!cut_.keeps(order, id)) continue;
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

  const Block& block_;
  FilteredShared& shared_;
  const ChooseArgs& args_;
  const LogitRow& row_;
  const SamplingState& state_;
  const float top_;
  const ChunkShare& share_;
  const float* x_;
  std::int32_t* found_;
  std::int32_t size_ = 0;
  Cut cut_;
};

}  // namespace specrt::cuda
