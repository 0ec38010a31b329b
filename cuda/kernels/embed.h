#pragma once

// Rows of the embedding table become the residual stream.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct EmbedArgs {
  const void* table = nullptr;           ///< [vocab, stride] of the kernel's type
  const std::int32_t* tokens = nullptr;  ///< [rows]; outside [0, vocab): a row of zeros
  float* out = nullptr;                  ///< [rows, width]
  std::int64_t vocab = 0;
  std::int64_t stride = 0;
  std::int64_t width = 0;
  float scale = 1.0f;
};

/// out[row] = scale * table[tokens[row]]. Grid: rows.
template <typename T>
struct Embed {
  static constexpr int kThreads = 256;
  using Args = EmbedArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t token = args.tokens[block.x()];
    const bool known = token >= 0 && token < args.vocab;
    const T* from = static_cast<const T*>(args.table) + (known ? token : 0) * args.stride;
    float* out = args.out + block.x() * args.width;
    for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
      out[i] = known ? to_float(from[i]) * args.scale : 0.0f;
    }
  }
};

}  // namespace specrt::cuda
