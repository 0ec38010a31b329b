#pragma once

// What a block of a layer adds to the residual stream, where it is not simply added: through a norm
// behind the block (Gemma, OLMo 2), or scaled (Granite).

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct AddBlockArgs {
  float* x = nullptr;             ///< [rows, width], the residual stream
  const float* block = nullptr;   ///< [rows, width]
  const float* weight = nullptr;  ///< [width], an RMSNorm's; null: none
  std::int64_t width = 0;
  float scale = 1.0f;
  float eps = 0.0f;
};

/// x[row] += scale * norm(block[row]). Grid: rows.
struct AddBlock {
  static constexpr int kThreads = 256;
  using Args = AddBlockArgs;
  struct Shared {
    float partial[kThreads / simt::kWarp];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const float* from = args.block + block.x() * args.width;
    float* x = args.x + block.x() * args.width;
    float norm = 1.0f;
    if (args.weight != nullptr) {
      float sum = 0.0f;
      for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
        sum = fused(from[i], from[i], sum);
      }
      sum = simt::block_sum<kThreads>(block, sum, shared.partial);
      norm = 1.0f / square_root(sum / static_cast<float>(args.width) + args.eps);
    }
    for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
      const float value = args.weight == nullptr ? from[i] : from[i] * norm * args.weight[i];
      x[i] = fused(value, args.scale, x[i]);
    }
  }
};

}  // namespace specrt::cuda
