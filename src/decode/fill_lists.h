#pragma once

#include <span>
#include <vector>

#include "decode/logits_state.h"
#include "model/cuda_favour.h"
#include "model/logit_lists.h"
#include "specrt/drafter.h"

namespace specrt {

/// What parameters and history come to, but for a grammar, among the first `vocab` tokens.
/// `draft_of_target`, where not empty, says which of a drafter's tokens they are (-1: none).
void fill_lists(const SamplingParams& params, const LogitsState& state, std::int64_t vocab,
                std::span<const std::int32_t> draft_of_target, LogitLists& out);

/// Requests of a batch, as CudaFavour is told of them. Keeps its memory.
class FavouredRequests {
 public:
  void clear() { count_ = 0; }
  /// Without noise, the most likely tokens are wanted of it.
  void add(const DraftRequest& request, std::int64_t vocab,
           std::span<const std::int32_t> draft_of_target, bool noise = true);
  /// Valid until the next call.
  std::span<const CudaFavour::Sequence> sequences();

 private:
  std::size_t count_ = 0;
  std::vector<LogitLists> lists_;
  std::vector<CudaFavour::Sequence> sequences_;
};

}  // namespace specrt
