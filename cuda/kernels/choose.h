#pragma once

// From rows of logits to tokens, in three steps: what each chunk of the vocabulary has (the highest
// logit, then weights), and what follows for the row.

#include "kernels/filtered.h"

namespace specrt::cuda {

/// The row's token. Grid: rows.
struct Choose {
  static constexpr int kThreads = FilteredShared::kThreads;
  using Args = ChooseArgs;
  using Shared = FilteredShared;

  template <class Block>
  SPECRT_KERNEL static void run(const Block& block, Shared& shared, const Args& args) {
    const LogitRow row = args.rows[block.x()];
    if (row.sequence < 0) return;
    const SamplingState& state = args.states[row.sequence];
    const ChunkTop top = row_top(args, block.x());
    std::int32_t token = top.id;
    if ((top.bad & 1) != 0 || top.raw == -infinity()) {
      token = kNotFinite;
    } else if ((top.bad & 2) != 0 || top.top == -infinity()) {
      token = kAllMasked;
    }
    const ChunkShare share = row_share(args, block.x());
    if (token >= 0 && state.temperature > 0.0f) {
      token = share.id;
      if (filters(state, args.vocab)) {
        Filtered<Block> filtered(block, shared, args, row, state, top.top, share);
        filtered.cut();
        token = filtered.race();
      }
    }
    if (block.thread() != 0) return;
    args.choices[block.x()] = token;
    float logprob = 0.0f;
    if (token >= 0) {
      const double raw = args.logits[block.x() * args.stride + token];
      logprob = static_cast<float>(raw - (double{top.raw} + log(share.raw_sum * 0x1p-40)));
    }
    args.logprobs[block.x()] = logprob;
  }
};

}  // namespace specrt::cuda
