#pragma once

// What stands between the product that makes q, k and v and attention: norms of queries and keys,
// rotation (Su et al., 2104.09864), and storing keys and values where the cache has them.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

/// Which vectors of queries and keys are normed.
enum class HeadNorm : std::uint8_t { none, head, whole };

struct RopeKvArgs {
  float* qkv =
      nullptr;  ///< [rows, qkv_stride]: q heads, then k heads, then v heads; q is rotated in place
  std::int64_t qkv_stride = 0;
  const std::int32_t* positions = nullptr;  ///< [rows]
  const std::int64_t* slots = nullptr;      ///< [rows]; negative: nothing is stored
  const float* cos = nullptr;               ///< [positions, pairs]
  const float* sin = nullptr;
  std::int64_t pairs = 0;  ///< of each head's first 2 * pairs values, i turns with i + pairs
  void* k = nullptr;       ///< [slots, kv_heads, head_dim] of the kernel's type
  void* v = nullptr;
  const float* q_norm = nullptr;  ///< [head_dim], or [heads * head_dim] where whole
  const float* k_norm = nullptr;
  HeadNorm norm = HeadNorm::none;
  float eps = 0.0f;
  std::int32_t q_heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
};

/// Grid: rows, by 2 (queries; keys and values).
template <typename T>
struct RopeKv {
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / simt::kWarp;
  using Args = RopeKvArgs;
  struct Shared {
    float partial[kWarps];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const bool keys = block.y() == 1;
    const std::int64_t dim = args.head_dim;
    const std::int64_t heads = keys ? args.kv_heads : args.q_heads;
    float* x = args.qkv + block.x() * args.qkv_stride + (keys ? args.q_heads * dim : 0);
    const float* weight = keys ? args.k_norm : args.q_norm;
    const std::int64_t slot = keys ? args.slots[block.x()] : -1;
    const std::int64_t position = args.positions[block.x()];
    const float* cos = args.cos + position * args.pairs;
    const float* sin = args.sin + position * args.pairs;

    float whole = 1.0f;
    if (args.norm == HeadNorm::whole) {
      float sum = 0.0f;
      for (std::int64_t i = block.thread(); i < heads * dim; i += kThreads) {
        sum = fused(x[i], x[i], sum);
      }
      sum = simt::block_sum<kThreads>(block, sum, shared.partial);
      whole = 1.0f / square_root(sum / static_cast<float>(heads * dim) + args.eps);
    }
    // A warp has a head to itself, so that nobody else reads or writes it.
    const int lane = block.thread() % simt::kWarp;
    for (std::int64_t head = block.thread() / simt::kWarp; head < heads; head += kWarps) {
      float* h = x + head * dim;
      T* stored = static_cast<T*>(args.k) + (slot * args.kv_heads + head) * dim;
      if (args.norm != HeadNorm::none) {
        float scale = whole;
        if (args.norm == HeadNorm::head) {
          float sum = 0.0f;
          for (std::int64_t i = lane; i < dim; i += simt::kWarp) sum = fused(h[i], h[i], sum);
          sum = simt::warp_sum(block, sum);
          scale = 1.0f / square_root(sum / static_cast<float>(dim) + args.eps);
        }
        const float* w = args.norm == HeadNorm::whole ? weight + head * dim : weight;
        for (std::int64_t i = lane; i < dim; i += simt::kWarp) h[i] = h[i] * scale * w[i];
        block.sync_warp();
      }
      for (std::int64_t i = lane; i < args.pairs; i += simt::kWarp) {
        const float a = h[i];
        const float b = h[args.pairs + i];
        h[i] = fused(-b, sin[i], a * cos[i]);
        h[args.pairs + i] = fused(a, sin[i], b * cos[i]);
      }
      if (slot < 0) continue;
      block.sync_warp();
      for (std::int64_t i = lane; i < dim; i += simt::kWarp) stored[i] = from_float<T>(h[i]);
    }
    if (slot < 0) return;
    const float* values = x + heads * dim;
    T* stored = static_cast<T*>(args.v) + slot * heads * dim;
    for (std::int64_t i = block.thread(); i < heads * dim; i += kThreads) {
      stored[i] = from_float<T>(values[i]);
    }
  }
};

}  // namespace specrt::cuda
