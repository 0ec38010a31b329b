#pragma once

// What each chunk of the vocabulary has of a row of logits: the highest one, then weights. Sums are
// of whole numbers, weights counted in 2^-40, so that they are the same in any order; ties go to
// the lower id.

#include "kernels/race.h"
#include "kernels/sampling_state.h"

namespace specrt::cuda {

inline constexpr std::int64_t kVocabChunk = 4096;
constexpr std::int64_t chunks_of(std::int64_t vocab) {
  return (vocab + kVocabChunk - 1) / kVocabChunk;
}

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
  std::int64_t chunks = 0;  ///< chunks_of(vocab)
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

/// A row's weights, out of its chunks'.
SPECRT_KERNEL ChunkShare row_share(const ChooseArgs& args, std::int64_t row) {
  ChunkShare share = args.shares[row * args.chunks];
  for (std::int64_t i = 1; i < args.chunks; ++i) {
    Weigh::take(share, args.shares[row * args.chunks + i]);
  }
  return share;
}

}  // namespace specrt::cuda
