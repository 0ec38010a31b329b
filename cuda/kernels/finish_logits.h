#pragma once

// Logits as a model means them, where its output head is not the end: scaled, then capped.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

struct FinishLogitsArgs {
  float* logits = nullptr;  ///< [rows, stride]
  std::int64_t stride = 0;
  std::int64_t vocab = 0;
  float scale = 1.0f;
  float cap = 0.0f;  ///< > 0: logits become cap * tanh(logit / cap)
};

/// Grid: ceil(vocab / kThreads) by rows.
struct FinishLogits {
  static constexpr int kThreads = 256;
  using Args = FinishLogitsArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t i = block.x() * kThreads + block.thread();
    if (i >= args.vocab) return;
    float& logit = args.logits[block.y() * args.stride + i];
    float value = logit * args.scale;
    if (args.cap > 0.0f) value = hyperbolic_tangent(value / args.cap) * args.cap;
    logit = value;
  }
};

}  // namespace specrt::cuda
