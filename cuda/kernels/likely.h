#pragma once

// The most likely tokens of rows of logits, with their log-probabilities: what a draft step brings
// back to the host.

#include "kernels/choose.h"

namespace specrt::cuda {

struct LikelyToken {
  std::int32_t id = -1;
  float value = 0.0f;
};

struct LikelyShare {
  float top = 0.0f;
  float sum = 0.0f;      ///< of exp(x - top)
  std::int32_t bad = 0;  ///< a NaN or +inf is among them
};

struct LikelyArgs {
  const float* logits = nullptr;  ///< [rows, stride]
  std::int64_t stride = 0;
  std::int64_t vocab = 0;
  std::int64_t chunks = 0;        ///< chunks_of(vocab)
  std::int32_t count = 1;         ///< that are asked for, at most the vocabulary
  LikelyShare* shares = nullptr;  ///< [rows, chunks]
  LikelyToken* found = nullptr;   ///< [rows, chunks, count], logits
  /// [rows, count], the largest first, equal ones by the lower id; -1 where a row's logits are not
  /// finite, or too few have any weight.
  LikelyToken* out = nullptr;
};

SPECRT_KERNEL bool likelier(const LikelyToken& a, const LikelyToken& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/// What is lower than everything: no token.
SPECRT_KERNEL LikelyToken no_token() { return {INT32_MAX, -infinity()}; }

/// The best of a block's tokens, in every thread. `warps` may be used again after a barrier.
template <int kThreads, class Block>
SPECRT_KERNEL LikelyToken best_of_block(const Block& block, LikelyToken best, LikelyToken* warps) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const LikelyToken other{block.shuffle_xor(best.id, mask), block.shuffle_xor(best.value, mask)};
    if (likelier(other, best)) best = other;
  }
  if (block.thread() % simt::kWarp == 0) warps[block.thread() / simt::kWarp] = best;
  block.sync();
  best = warps[0];
  for (int warp = 1; warp < kThreads / simt::kWarp; ++warp) {
    if (likelier(warps[warp], best)) best = warps[warp];
  }
  return best;
}

/// Every chunk's best, each the best of what is behind the one before. Grid: chunks by rows.
struct LikelyInChunk {
  static constexpr int kThreads = 256;
  static constexpr int kHeld = static_cast<int>(kVocabChunk / kThreads);
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = LikelyArgs;
  struct Shared {
    LikelyToken warps[2][kWarps];
    float sums[kWarps];
    std::int32_t bad[kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const float* logits = args.logits + block.y() * args.stride;
    const std::int64_t begin = block.x() * kVocabChunk;
    const std::int64_t at = block.y() * args.chunks + block.x();
    float held[kHeld];
    bool bad = false;
    SPECRT_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const std::int64_t id = begin + i * kThreads + block.thread();
      held[i] = id < args.vocab ? logits[id] : -infinity();
      if (!(held[i] < infinity())) bad = true;
    }
    bad = block.any(bad);
    if (block.thread() % simt::kWarp == 0) shared.bad[block.thread() / simt::kWarp] = bad ? 1 : 0;

    LikelyToken last{-1, infinity()};
    LikelyShare share;
    for (std::int32_t n = 0; n < args.count; ++n) {
      LikelyToken best = no_token();
      SPECRT_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const LikelyToken one{static_cast<std::int32_t>(begin + i * kThreads + block.thread()),
                              held[i]};
        if (likelier(last, one) && likelier(one, best)) best = one;
      }
      last = best_of_block<kThreads>(block, best, shared.warps[n % 2]);
      if (n == 0) share.top = last.value;
      if (block.thread() == 0) args.found[at * args.count + n] = last;
    }
    float sum = 0.0f;
    if (share.top > -infinity()) {
      SPECRT_UNROLL
      for (int i = 0; i < kHeld; ++i) sum = sum + exponential(held[i] - share.top);
    }
    share.sum = simt::block_sum<kThreads>(block, sum, shared.sums);
    if (block.thread() != 0) return;
    for (int warp = 0; warp < kWarps; ++warp) share.bad |= shared.bad[warp];
    args.shares[at] = share;
  }
};

/// A row's best, out of its chunks'. Grid: rows.
struct Likely {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = LikelyArgs;
  struct Shared {
    LikelyToken warps[2][kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LikelyShare* shares = args.shares + block.x() * args.chunks;
    float top = -infinity();
    bool bad = false;
    for (std::int64_t i = 0; i < args.chunks; ++i) {
      top = larger(top, shares[i].top);
      bad = bad || shares[i].bad != 0;
    }
    bad = bad || !(top > -infinity());
    double sum = 0.0;
    for (std::int64_t i = 0; i < args.chunks && !bad; ++i) {
      sum += static_cast<double>(shares[i].sum) *
             static_cast<double>(exponential(shares[i].top - top));
    }
    const float lse = bad ? 0.0f : static_cast<float>(static_cast<double>(top) + log(sum));

    const std::int64_t entries = args.chunks * args.count;
    const LikelyToken* found = args.found + block.x() * entries;
    LikelyToken last{-1, infinity()};
    for (std::int32_t n = 0; n < args.count; ++n) {
      LikelyToken best = no_token();
      for (std::int64_t i = block.thread(); i < entries && !bad; i += kThreads) {
        const LikelyToken one = found[i];
        if (likelier(last, one) && likelier(one, best)) best = one;
      }
      last = best_of_block<kThreads>(block, best, shared.warps[n % 2]);
      if (block.thread() != 0) continue;
      const bool there = !bad && last.value > -infinity();
      args.out[block.x() * args.count + n] = {there ? last.id : -1,
                                              there ? last.value - lse : -infinity()};
    }
  }
};

}  // namespace specrt::cuda
