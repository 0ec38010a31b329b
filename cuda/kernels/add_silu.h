#pragma once

// The end of a residual block of Medusa's (Cai et al. 2401.10774): x += silu(W x + b), and what the
// next product reads of it.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct AddSiluArgs {
  float* x = nullptr;            ///< [rows, width]
  const float* block = nullptr;  ///< [rows, width]
  void* rounded = nullptr;       ///< [rows, rounded_stride] of the kernel's type
  std::int64_t rounded_stride = 0;
  std::int64_t width = 0;
};

/// Grid: ceil(width / kThreads) by rows. Columns of `rounded` behind `width` stay as they are.
template <typename T>
struct AddSilu {
  static constexpr int kThreads = 256;
  using Args = AddSiluArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t i = block.x() * kThreads + block.thread();
    if (i >= args.width) return;
    const std::int64_t at = block.y() * args.width + i;
    const float value = args.x[at] + silu(args.block[at]);
    args.x[at] = value;
    static_cast<T*>(args.rounded)[block.y() * args.rounded_stride + i] = from_float<T>(value);
  }
};

}  // namespace specrt::cuda
