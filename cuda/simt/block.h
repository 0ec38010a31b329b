#pragma once

// What a kernel sees of the block that runs it. A kernel is a struct:
//
//   struct Sum {
//     static constexpr int kThreads = 128;            // of every block, a multiple of 32
//     struct Args { const float* x; ... };            // plain, passed by value
//     struct Shared { float partial[4]; };            // plain; starts undefined
//     template <class Block>
//     SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args);
//   };
//
// launch() (launch.cuh) starts a grid of it on a GPU with a DeviceBlock; run_grid() (host.h) runs
// the same source on the host, threads as fibres, with a HostBlock. Both have
//
//   thread(), x(), y(), z()     of the thread in its block, of the block in the grid
//   sync(), sync_warp()         barriers: every thread of the block, of the warp, takes part
//   shuffle_xor(v, mask)        v of lane ^ mask        (a warp's 32 lanes take part)
//   shuffle(v, lane)            v of that lane
//   any(bool)                   whether it holds in any lane of the warp
//   copy_async(to, from, bytes) 16 bytes of shared memory from global, those beyond `bytes` zero
//   copy_commit(), copy_wait<n>()  ends a group of copies; until at most n groups are under way
//   mma<T>(d, a, b)             d += a b of one warp, m16n8k16, T = Bf16 or Half, d float
//   load_transposed(r, row)     ldmatrix.x4.trans: `row` is this lane's row of 8 16-bit values
//
// Rules (same bytes): a sum's order follows from the element's place alone; no atomics; what a
// block computes does not depend on how many blocks there are.

#include <cstdint>
#include <type_traits>

#include "simt/number.h"
#include "simt/target.h"

namespace specrt::simt {

inline constexpr int kWarp = 32;

struct Grid {
  std::int64_t x = 1;
  std::int64_t y = 1;
  std::int64_t z = 1;
};

#if defined(__CUDACC__)

/// The block of a GPU. Its host side is never run; nvcc only wants one.
class DeviceBlock {
 public:
#if SPECRT_ON_DEVICE
  SPECRT_KERNEL int thread() const { return static_cast<int>(threadIdx.x); }
  SPECRT_KERNEL std::int64_t x() const { return blockIdx.x; }
  SPECRT_KERNEL std::int64_t y() const { return blockIdx.y; }
  SPECRT_KERNEL std::int64_t z() const { return blockIdx.z; }
  SPECRT_KERNEL void sync() const { __syncthreads(); }
  SPECRT_KERNEL void sync_warp() const { __syncwarp(); }
  template <typename T>
  SPECRT_KERNEL T shuffle_xor(T value, int mask) const {
    return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
  }
  template <typename T>
  SPECRT_KERNEL T shuffle(T value, int lane) const {
    return __shfl_sync(0xFFFFFFFFu, value, lane);
  }
  SPECRT_KERNEL bool any(bool value) const { return __any_sync(0xFFFFFFFFu, value) != 0; }

  SPECRT_KERNEL void copy_async(void* to, const void* from, int bytes) const {
    const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
  }
  SPECRT_KERNEL void copy_commit() const { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
  template <int kLeft>
  SPECRT_KERNEL void copy_wait() const {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kLeft) : "memory");
  }

  template <typename T>
  SPECRT_KERNEL void mma(float (&d)[4], const std::uint32_t (&a)[4],
                         const std::uint32_t (&b)[2]) const {
    if constexpr (std::is_same_v<T, Bf16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};\n"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};\n"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  SPECRT_KERNEL void load_transposed(std::uint32_t (&r)[4], const void* row) const {
    const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  }
#else
  SPECRT_KERNEL int thread() const { return 0; }
  SPECRT_KERNEL std::int64_t x() const { return 0; }
  SPECRT_KERNEL std::int64_t y() const { return 0; }
  SPECRT_KERNEL std::int64_t z() const { return 0; }
  SPECRT_KERNEL void sync() const {}
  SPECRT_KERNEL void sync_warp() const {}
  template <typename T>
  SPECRT_KERNEL T shuffle_xor(T value, int) const {
    return value;
  }
  template <typename T>
  SPECRT_KERNEL T shuffle(T value, int) const {
    return value;
  }
  SPECRT_KERNEL bool any(bool value) const { return value; }
  SPECRT_KERNEL void copy_async(void*, const void*, int) const {}
  SPECRT_KERNEL void copy_commit() const {}
  template <int kLeft>
  SPECRT_KERNEL void copy_wait() const {}
  template <typename T>
  SPECRT_KERNEL void mma(float (&)[4], const std::uint32_t (&)[4],
                         const std::uint32_t (&)[2]) const {}
  SPECRT_KERNEL void load_transposed(std::uint32_t (&)[4], const void*) const {}
#endif
};

#endif

/// The sum over a warp's lanes, the same bits in each: lanes are added by distance 16, 8, 4, 2, 1.
template <class Block, typename T>
SPECRT_KERNEL T warp_sum(const Block& block, T value) {
  for (int mask = 16; mask > 0; mask /= 2) value = value + block.shuffle_xor(value, mask);
  return value;
}

/// The sum over a block's threads, the same bits in each: by warp, then warps in order. `partial`
/// is shared, one entry a warp; it may be used again after a barrier.
template <int kThreads, class Block, typename T>
SPECRT_KERNEL T block_sum(const Block& block, T value, T* partial) {
  value = warp_sum(block, value);
  if (block.thread() % kWarp == 0) partial[block.thread() / kWarp] = value;
  block.sync();
  T sum = partial[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) sum = sum + partial[warp];
  return sum;
}

}  // namespace specrt::simt
