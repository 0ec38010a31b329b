#pragma once

// The tokens that the target's own noise favours, of rows whose sequences sample: the first of the
// race that the target runs itself (decode/choose.h: Chooser::ranked), behind temperature and
// filters. In two steps: every chunk's first, then the row's.

#include "kernels/filtered.h"
#include "kernels/likely.h"

namespace specrt::cuda {

struct FavouredToken {
  double key = 0.0;  ///< of the race: the lower, the sooner
  std::int32_t id = -1;
  float value = 0.0f;  ///< its log-probability, but for the sum
};

struct FavourArgs {
  /// Logits, rows, states (all neutral), and room for what FindTops, Weigh and Filtered make. Of
  /// logits no more than the vocabulary that the target has, too.
  ChooseArgs choose;
  const std::int32_t* target_of_draft = nullptr;  ///< by whose ids noise is drawn; null: the same
  std::int32_t count = 1;                         ///< that are asked for, at most kMostFavoured
  bool raw = false;                ///< log-probabilities are at temperature 1 and without filters
  Cut* cuts = nullptr;             ///< [rows], of those with filters
  FavouredToken* found = nullptr;  ///< [rows, chunks, count]
  float* sums = nullptr;           ///< [rows, chunks]
  /// [rows, count], the first of the race first; -1 where a row's logits are not finite, or too few
  /// tokens have any weight. Greedy sequences' rows are left as they are.
  LikelyToken* out = nullptr;
  /// [rows, count]: the log of a token's share among these of exp(log-probability + noise); of a
  /// greedy sequence the log-probability. Null: nobody asks.
  float* scores = nullptr;
};

inline constexpr std::int32_t kMostFavoured = 64;

SPECRT_KERNEL bool sooner(const FavouredToken& a, const FavouredToken& b) {
  return a.key < b.key || (a.key == b.key && a.id < b.id);
}

/// Behind everything: no token.
SPECRT_KERNEL FavouredToken nobody() {
  return {static_cast<double>(infinity()), INT32_MAX, -infinity()};
}

/// The first of a block's tokens, in every thread. `warps` may be used again after a barrier.
template <int kThreads, class Block>
SPECRT_KERNEL FavouredToken first_of_block(const Block& block, FavouredToken best,
                                           FavouredToken* warps) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const FavouredToken other{block.shuffle_xor(best.key, mask), block.shuffle_xor(best.id, mask),
                              block.shuffle_xor(best.value, mask)};
    if (sooner(other, best)) best = other;
  }
  if (block.thread() % simt::kWarp == 0) warps[block.thread() / simt::kWarp] = best;
  block.sync();
  best = warps[0];
  for (int warp = 1; warp < kThreads / simt::kWarp; ++warp) {
    if (sooner(warps[warp], best)) best = warps[warp];
  }
  return best;
}

/// Whether the row's sequence samples, and its logits are numbers.
SPECRT_KERNEL bool is_favoured(const SamplingState& state, const ChunkTop& top) {
  return state.temperature > 0.0f && top.bad == 0 && top.top > -infinity();
}

/// What the filters of rows that have some leave, once FindTops and Weigh have been. Grid: rows.
struct FindCuts {
  static constexpr int kThreads = FilteredShared::kThreads;
  using Args = FavourArgs;
  using Shared = FilteredShared;

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LogitRow row = args.choose.rows[block.x()];
    if (row.sequence < 0) return;
    const SamplingState& state = args.choose.states[row.sequence];
    const ChunkTop top = row_top(args.choose, block.x());
    if (!is_favoured(state, top) || !filters(state, args.choose.vocab)) return;
    const ChunkShare share = row_share(args.choose, block.x());
    Filtered<Block> filtered(block, shared, args.choose, row, state, top.top, share);
    const Cut cut = filtered.cut();
    if (block.thread() == 0) args.cuts[block.x()] = cut;
  }
};

/// Every chunk's first, each the first behind the one before. Grid: chunks by rows.
struct FavourInChunk {
  static constexpr int kThreads = 256;
  static constexpr int kGroups = static_cast<int>(kVocabChunk / kThreads / 4);
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = FavourArgs;
  struct Shared {
    FavouredToken warps[2][kWarps];
    float sums[kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const ChooseArgs& of = args.choose;
    const LogitRow row = of.rows[block.y()];
    if (row.sequence < 0) return;
    const SamplingState& state = of.states[row.sequence];
    const ChunkTop top = row_top(of, block.y());
    if (!is_favoured(state, top)) return;
    const float* x = logits_of(of, block.y());
    Cut cut;
    double least = 0.0;
    if (filters(state, of.vocab)) {
      cut = args.cuts[block.y()];
      least = state.min_p;
    }
    const std::int64_t begin = block.x() * kVocabChunk;
    const std::int64_t at = block.y() * of.chunks + block.x();
    double keys[kGroups * 4];
    float sum = 0.0f;
    SPECRT_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      const std::int64_t first = begin + 4 * (group * kThreads + block.thread());
      const Noise noise(state, row.position, args.target_of_draft == nullptr && first < of.vocab,
                        first);
      SPECRT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const std::int64_t id = first + i;
        double& key = keys[group * 4 + i];
        key = static_cast<double>(infinity());
        if (id >= of.vocab) continue;
        if (args.raw) sum = sum + exponential(x[id] - top.top);
        const float weight = exponential((x[id] - top.top) * state.inv_temperature);
        if (!(weight > 0.0f) || !(static_cast<double>(weight) >= least)) continue;
        if (!cut.keeps(order_of(x[id]), static_cast<std::int32_t>(id))) continue;
        if (!args.raw) sum = sum + weight;
        const std::uint32_t bits =
            args.target_of_draft == nullptr
                ? noise.words[static_cast<std::size_t>(i)]
                : choice_noise(state, row.position, args.target_of_draft[id]);
        key = -log1p(-uniform_from_bits(bits)) / static_cast<double>(weight);
      }
    }
    FavouredToken last{-1.0, -1, 0.0f};
    for (std::int32_t n = 0; n < args.count; ++n) {
      FavouredToken best = nobody();
      SPECRT_UNROLL
      for (int i = 0; i < kGroups * 4; ++i) {
        const std::int64_t id = begin + 4 * (i / 4 * kThreads + block.thread()) + i % 4;
        const FavouredToken one{keys[i], static_cast<std::int32_t>(id), 0.0f};
        if (keys[i] < static_cast<double>(infinity()) && sooner(last, one) && sooner(one, best)) {
          best = one;
        }
      }
      last = first_of_block<kThreads>(block, best, shared.warps[n % 2]);
      if (block.thread() != 0) continue;
      FavouredToken found = last;
      if (found.id != INT32_MAX) {
        found.value = x[found.id] - top.top;
        if (!args.raw) found.value *= state.inv_temperature;
      }
      args.found[at * args.count + n] = found;
    }
    block.sync();
    sum = simt::block_sum<kThreads>(block, sum, shared.sums);
    if (block.thread() == 0) args.sums[at] = sum;
  }
};

/// A row's first, out of its chunks'. Grid: rows.
struct Favour {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = FavourArgs;
  struct Shared {
    FavouredToken warps[2][kWarps];
    double keys[kMostFavoured];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const ChooseArgs& of = args.choose;
    const LogitRow row = of.rows[block.x()];
    if (row.sequence < 0) return;
    const SamplingState& state = of.states[row.sequence];
    LikelyToken* out = args.out + block.x() * args.count;
    float* scores = args.scores == nullptr ? nullptr : args.scores + block.x() * args.count;
    if (!(state.temperature > 0.0f)) {
      if (scores == nullptr) return;
      for (std::int32_t n = block.thread(); n < args.count; n += kThreads) scores[n] = out[n].value;
      return;
    }
    const bool fine = is_favoured(state, row_top(of, block.x()));
    double sum = 0.0;
    for (std::int64_t i = 0; i < of.chunks && fine; ++i) {
      sum += static_cast<double>(args.sums[block.x() * of.chunks + i]);
    }
    const std::int64_t entries = of.chunks * args.count;
    const FavouredToken* found = args.found + block.x() * entries;
    FavouredToken last{-1.0, -1, 0.0f};
    double shares = 0.0;
    for (std::int32_t n = 0; n < args.count; ++n) {
      FavouredToken best = nobody();
      for (std::int64_t i = block.thread(); i < entries && fine; i += kThreads) {
        const FavouredToken one = found[i];
        if (one.id != INT32_MAX && sooner(last, one) && sooner(one, best)) best = one;
      }
      last = first_of_block<kThreads>(block, best, shared.warps[n % 2]);
      if (block.thread() != 0) continue;
      const bool there = last.id != INT32_MAX;
      shared.keys[n] = last.key;
      shares += there ? shared.keys[0] / last.key : 0.0;
      const double log_prob = static_cast<double>(last.value) - log(sum);
      out[n] = {there ? last.id : -1, there ? static_cast<float>(log_prob) : -infinity()};
    }
    if (block.thread() != 0 || scores == nullptr) return;
    for (std::int32_t n = 0; n < args.count; ++n) {
      const bool there = out[n].id >= 0;
      scores[n] =
          there ? static_cast<float>(log(shared.keys[0] / shared.keys[n] / shares)) : -infinity();
    }
  }
};

}  // namespace specrt::cuda
