#pragma once

// Small kernels that ask what a block is, on the host and on a GPU. With names of their own, since
// the GPU's are another unit's (tests/cuda_device/kernels.cu).

#include "kernels/arithmetic.h"

namespace cuda_test {

struct ReverseArgs {
  const float* x;
  float* out;
  bool barrier;
};

/// Writes a block's numbers in reverse, through shared memory.
struct Reverse {
  static constexpr int kThreads = 64;
  using Args = ReverseArgs;
  struct Shared {
    float x[kThreads];
  };
  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    shared.x[block.thread()] = args.x[block.thread()];
    if (args.barrier) block.sync();
    args.out[block.thread()] = shared.x[kThreads - 1 - block.thread()];
  }
};

struct CopiesArgs {
  const float* x;
  float* out;
  bool wait;
};

/// Two groups of asynchronous copies, of which the first is read before the second has come.
struct Copies {
  static constexpr int kThreads = 32;
  using Args = CopiesArgs;
  struct Shared {
    alignas(16) float x[2][128];
  };
  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const int at = 4 * block.thread();
    block.copy_async(&shared.x[0][at], args.x + at, 16);
    block.copy_commit();
    block.copy_async(&shared.x[1][at], args.x + at, 8);
    block.copy_commit();
    if (args.wait) block.template copy_wait<1>();
    args.out[block.thread()] = shared.x[0][at];
    block.template copy_wait<0>();
    args.out[32 + block.thread()] = shared.x[1][at + 1] + shared.x[1][at + 2];
  }
};

template <typename T>
struct MmaArgs {
  const T* a;  ///< [16][16]
  const T* b;  ///< [16 of k][8]
  float* d;    ///< [16][8]
};

/// B comes by load_transposed from rows of k, as attention's values do.
template <typename T>
struct Mma {
  static constexpr int kThreads = 32;
  using Args = MmaArgs<T>;
  struct Shared {
    alignas(16) T b[16][16];
  };
  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const int lane = block.thread();
    const int g = lane / 4, c = lane % 4;
    for (int i = lane; i < 256; i += 32) {
      shared.b[i / 16][i % 16] = i % 16 < 8 ? args.b[i / 16 * 8 + i % 16] : T{0};
    }
    block.sync();
    const auto pair = [&](int row, int k) {
      return args.a[row * 16 + k].bits | std::uint32_t{args.a[row * 16 + k + 1].bits} << 16;
    };
    const std::uint32_t a[4] = {pair(g, 2 * c), pair(g + 8, 2 * c), pair(g, 2 * c + 8),
                                pair(g + 8, 2 * c + 8)};
    std::uint32_t v[4];
    block.load_transposed(v, &shared.b[lane % 16][lane / 16 * 8]);
    const std::uint32_t b[2] = {v[0], v[1]};
    float d[4] = {};
    block.template mma<T>(d, a, b);
    for (int i = 0; i < 4; ++i) args.d[(g + i / 2 * 8) * 8 + 2 * c + i % 2] = d[i];
    // The right half of the rows is empty.
    if (v[2] != 0 || v[3] != 0) args.d[0] = 1e9f;
  }
};

struct LanesArgs {
  float* sums;        ///< [threads]: warp_sum of x
  float* block_sums;  ///< [threads]
  float* turned;      ///< [threads]: what the lane beside has
  int* any;           ///< [threads]
  const float* x;     ///< [threads]
};

/// What lanes tell each other.
struct Lanes {
  static constexpr int kThreads = 64;
  using Args = LanesArgs;
  struct Shared {
    float partial[kThreads / specrt::simt::kWarp];
  };
  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const int thread = block.thread();
    const float x = args.x[thread];
    args.sums[thread] = specrt::simt::warp_sum(block, x);
    args.block_sums[thread] = specrt::simt::block_sum<kThreads>(block, x, shared.partial);
    args.turned[thread] = block.shuffle(x, (thread + 1) % specrt::simt::kWarp);
    args.any[thread] = block.any(thread == 40) ? 1 : 0;
  }
};

struct NumbersArgs {
  const float* x;
  std::int64_t n;
  std::uint16_t* half;
  std::uint16_t* bf16;
  float* back;  ///< of the half
  float* exponential;
};

/// 16-bit floats and the exponential, of each number.
struct Numbers {
  static constexpr int kThreads = 128;
  using Args = NumbersArgs;
  struct Shared {};
  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t i = block.x() * kThreads + block.thread();
    if (i >= args.n) return;
    const specrt::simt::Half half = specrt::simt::from_float<specrt::simt::Half>(args.x[i]);
    args.half[i] = half.bits;
    args.bf16[i] = specrt::simt::from_float<specrt::simt::Bf16>(args.x[i]).bits;
    args.back[i] = specrt::simt::to_float(half);
    args.exponential[i] = specrt::cuda::exponential(args.x[i]);
  }
};

}  // namespace cuda_test
