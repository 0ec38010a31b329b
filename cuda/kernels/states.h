#pragma once

// Hidden states on their way: out of a pass to whoever keeps them, into a draft head's inputs,
// through a norm or as they are.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct StatesArgs {
  const float* const* from = nullptr;  ///< [rows]: where each begins; a null one: zeros
  const float* x = nullptr;            ///< [rows, x_stride], where `from` is null
  std::int64_t x_stride = 0;
  std::int64_t offset = 0;                  ///< of what is read, in a row of either
  const std::int32_t* positions = nullptr;  ///< where given, a row at position 0 counts as zeros
  const float* weight = nullptr;            ///< [width], an RMSNorm's (1910.07467); null: none
  std::int64_t width = 0;
  float eps = 0.0f;

  // Any of these may be null.
  void* rounded = nullptr;  ///< [rows, rounded_stride] of the kernel's type
  std::int64_t rounded_stride = 0;
  std::int64_t rounded_width = 0;  ///< >= width: what lies between is set to zero
  float* kept = nullptr;           ///< [rows, kept_stride]
  std::int64_t kept_stride = 0;
  float* const* to = nullptr;  ///< [rows]: where each goes; a null one goes nowhere
};

/// Each row's state, normed where there is a weight. Grid: rows.
template <typename T>
struct States {
  static constexpr int kThreads = 256;
  using Args = StatesArgs;
  struct Shared {
    float partial[kThreads / simt::kWarp];
  };

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const std::int64_t row = block.x();
    const float* x = args.from != nullptr ? args.from[row] : args.x + row * args.x_stride;
    const bool there = x != nullptr && (args.positions == nullptr || args.positions[row] != 0);
    if (there) x += args.offset;
    float scale = 1.0f;
    if (args.weight != nullptr) {
      float sum = 0.0f;
      for (std::int64_t i = block.thread(); there && i < args.width; i += kThreads) {
        sum = fused(x[i], x[i], sum);
      }
      sum = simt::block_sum<kThreads>(block, sum, shared.partial);
      scale = 1.0f / square_root(sum / static_cast<float>(args.width) + args.eps);
    }
    T* const rounded = args.rounded == nullptr
                           ? nullptr
                           : static_cast<T*>(args.rounded) + row * args.rounded_stride;
    float* const kept = args.kept == nullptr ? nullptr : args.kept + row * args.kept_stride;
    float* const to = args.to == nullptr ? nullptr : args.to[row];
    for (std::int64_t i = block.thread(); i < args.width; i += kThreads) {
      float value = there ? x[i] : 0.0f;
      if (args.weight != nullptr) value = value * scale * args.weight[i];
      if (rounded != nullptr) rounded[i] = from_float<T>(value);
      if (kept != nullptr) kept[i] = value;
      if (to != nullptr) to[i] = value;
    }
    if (rounded == nullptr) return;
    for (std::int64_t i = args.width + block.thread(); i < args.rounded_width; i += kThreads) {
      rounded[i] = from_float<T>(0.0f);
    }
  }
};

}  // namespace specrt::cuda
