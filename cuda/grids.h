#pragma once

// Which kernels an operation is, and over which grids: the same on a GPU and on the emulated
// device. `on.launch<Kernel>(grid, args)` is what differs.

#include "gemm/arguments.h"
#include "ops.h"

namespace specrt::cuda {

inline bool is_gated(After after) { return after == After::gate_silu || after == After::gate_gelu; }

template <typename T, class On>
void finish_product(const On& on, const FinishArgs& args) {
  const std::int64_t outputs = is_gated(args.after) ? args.y_stride : args.n;
  on.template launch<FinishProduct<T>>({(outputs + 255) / 256, args.rows}, args);
}

template <typename T, Stored kStored, class On>
void mma_product(const On& on, GemmArgs args, float* workspace) {
  args.parallel = args.splits > 1 && args.rows <= kMostParallel;
  args.partials = workspace;
  const std::int64_t columns = (panels_of(args.n) + kBlockPanels - 1) / kBlockPanels;
  const std::int64_t splits = args.parallel ? args.splits : 1;
  const auto grid = [&](std::int64_t tokens) {
    return simt::Grid{columns, (args.rows + tokens - 1) / tokens, splits};
  };
  if (args.rows <= 16) {
    on.template launch<Gemm<T, kStored, 16>>(grid(16), args);
  } else if (args.rows <= 32) {
    on.template launch<Gemm<T, kStored, 32>>(grid(32), args);
  } else {
    // A wider tile would not fit into registers, with sums of a split and of all beside each other.
    on.template launch<Gemm<T, kStored, 64>>(grid(64), args);
  }
  if (!args.parallel) return;
  finish_product<T>(on, {workspace, args.bias, args.y, args.rows, args.n, args.y_stride,
                         args.splits, args.after});
}

template <typename T, class On>
void attention(const On& on, const AttentionArgs& args, std::int64_t rows, std::int64_t units) {
  const simt::Grid grid{units, args.kv_heads, args.segments};
  if (args.head_dim <= 64) {
    on.template launch<Attention<T, 64>>(grid, args);
  } else if (args.head_dim <= 128) {
    on.template launch<Attention<T, 128>>(grid, args);
  } else {
    on.template launch<Attention<T, 256>>(grid, args);
  }
  if (args.segments > 1) on.template launch<AttentionCombine<T>>({rows, args.q_heads}, args);
}

template <typename T, class On>
void add_silu(const On& on, const AddSiluArgs& args, std::int64_t rows) {
  constexpr std::int64_t kThreads = AddSilu<T>::kThreads;
  on.template launch<AddSilu<T>>({(args.width + kThreads - 1) / kThreads, rows}, args);
}

template <class On>
void finish_logits(const On& on, const FinishLogitsArgs& args, std::int64_t rows) {
  constexpr std::int64_t kThreads = FinishLogits::kThreads;
  on.template launch<FinishLogits>({(args.vocab + kThreads - 1) / kThreads, rows}, args);
}

template <class On>
void likely(const On& on, const LikelyArgs& args, std::int64_t rows) {
  on.template launch<LikelyInChunk>({args.chunks, rows}, args);
  on.template launch<Likely>({rows}, args);
}

template <class On>
void favour(const On& on, const FavourArgs& args, std::int64_t rows, bool filtered) {
  on.template launch<FindTops>({args.choose.chunks, rows}, args.choose);
  if (filtered) {
    on.template launch<Weigh>({args.choose.chunks, rows}, args.choose);
    on.template launch<FindCuts>({rows}, args);
  }
  on.template launch<FavourInChunk>({args.choose.chunks, rows}, args);
  on.template launch<Favour>({rows}, args);
}

template <class On>
void choose(const On& on, const ProcessArgs& process, const ChooseArgs& args, std::int64_t rows) {
  on.template launch<ProcessLogits>({rows}, process);
  on.template launch<FindTops>({args.chunks, rows}, args);
  on.template launch<Weigh>({args.chunks, rows}, args);
  on.template launch<Choose>({rows}, args);
}

template <class On>
void commit(const On& on, const CommitArgs& args, std::int64_t sequences, std::int64_t planes) {
  on.template launch<Commit>({args.most_nodes, sequences, planes}, args);
}

}  // namespace specrt::cuda
