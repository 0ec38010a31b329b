#pragma once

// The end of a product whose k was split, or that has more to do to its sums than store them:
// splits are added in order, then come bias, residual stream or activation.

#include "kernels/arithmetic.h"

namespace specrt::cuda {

/// What becomes of a product's sums.
enum class After : std::uint8_t {
  store,      ///< y = sums + bias
  add,        ///< y = y + sums + bias: the residual stream
  gate_silu,  ///< y = silu(gate) * up, rounded: rows of gate and up take turns, see kGateRows
  gate_gelu,
};

/// Outputs of gate and up lie by turns of so many rows in their weight, as a fragment of the matrix
/// unit has them: a thread that holds one of the pair holds the other.
inline constexpr std::int64_t kGateRows = 8;

/// Where the gate of output i is among the rows of gate and up; its up is kGateRows behind.
constexpr std::int64_t gate_row(std::int64_t i) {
  return i / kGateRows * 2 * kGateRows + i % kGateRows;
}

struct FinishArgs {
  const float* sums = nullptr;  ///< [splits, rows, n]
  const float* bias = nullptr;  ///< [n] or null
  void* y = nullptr;            ///< [rows, y_stride]: float, or of the kernel's type where gated
  std::int64_t rows = 0;
  std::int64_t n = 0;         ///< of the product; a gated y has half as many
  std::int64_t y_stride = 0;  ///< gated: what lies between n / 2 and here is set to zero
  std::int32_t splits = 1;
  After after = After::store;
};

/// Grid: ceil(outputs / kThreads) by rows, outputs being n, or y_stride where gated.
template <typename T>
struct FinishProduct {
  static constexpr int kThreads = 256;
  using Args = FinishArgs;
  struct Shared {};

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared&, const Args& args) {
    const std::int64_t i = block.x() * kThreads + block.thread();
    const std::int64_t row = block.y();
    if (args.after == After::store || args.after == After::add) {
      if (i >= args.n) return;
      float* y = static_cast<float*>(args.y) + row * args.y_stride + i;
      *y = args.after == After::add ? sum(args, row, i, *y) : sum(args, row, i);
      return;
    }
    if (i >= args.y_stride) return;
    float value = 0.0f;
    if (i < args.n / 2) {
      const std::int64_t at = gate_row(i);
      value = activate(args.after == After::gate_silu ? Activation::silu : Activation::gelu_tanh,
                       sum(args, row, at), sum(args, row, at + kGateRows));
    }
    static_cast<T*>(args.y)[row * args.y_stride + i] = from_float<T>(value);
  }

 private:
  // Onto `before`, split by split: what a product does that takes its splits one after the other.
  SPECRT_KERNEL static float sum(const Args& args, std::int64_t row, std::int64_t i, float before) {
    const float* from = args.sums + row * args.n + i;
    for (int split = 0; split < args.splits; ++split) before += from[split * args.rows * args.n];
    return args.bias == nullptr ? before : before + args.bias[i];
  }
  SPECRT_KERNEL static float sum(const Args& args, std::int64_t row, std::int64_t i) {
    const float* from = args.sums + row * args.n + i;
    float sum = from[0];
    for (int split = 1; split < args.splits; ++split) sum += from[split * args.rows * args.n];
    return args.bias == nullptr ? sum : sum + args.bias[i];
  }
};

}  // namespace specrt::cuda
