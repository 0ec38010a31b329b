#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/cuda_favour.h"
#include "model/cuda_runner.h"
#include "specrt/draft_tree.h"
#include "specrt/sampling.h"

namespace specrt {

/// Draft trees of a drafter on a GPU, grown there: the host puts pass behind pass without knowing
/// what is in them, and one copy brings the trees. How they grow is CandidateTree's affair.
///
/// A group of drafts: begin(); rank() of every root's row; then for each level set_step() for every
/// draft, and level() in a pass that has the nodes, with their rank() behind it, or, behind the
/// last one, finish().
class CudaGrowth {
 public:
  /// Whether trees of that size are grown here.
  static bool fits(std::int64_t top_k, std::int64_t depth);
  static constexpr std::int64_t kMostNodes = cuda::FinishDraft::kMostNodes;
  /// Beside lists (CudaFavour). `target_vocab`: 0 where the drafter's ids are the target's.
  static std::int64_t device_bytes(std::int64_t drafts, std::int64_t top_k, std::int64_t depth,
                                   std::int64_t draft_vocab, std::int64_t target_vocab);

  /// Rows are a head's nodes in scratch slots, or the positions of a model's chains. Of a chain's
  /// tokens the log-probabilities are those at temperature 1, without filters (ChainDraft).
  enum class Rows : bool { nodes, positions };
  /// `target_of_draft` may be empty: the drafter's ids are the target's.
  CudaGrowth(CudaRunner& runner, Rows rows, std::int64_t drafts, std::int64_t top_k,
             std::int64_t depth, std::span<const TokenId> target_of_draft,
             std::int64_t target_vocab);

  struct Draft {
    std::int64_t levels = 1;
    std::int64_t nodes = 1;
  };
  /// `sequences` are the drafts'. False where there is no room for what they say (CudaFavour).
  bool begin(std::span<const Draft> drafts, std::span<const CudaFavour::Sequence> sequences);
  std::int64_t list_bytes() const { return favour_.list_bytes(); }
  std::span<const std::int32_t> draft_of_target() const { return favour_.draft_of_target(); }
  std::int64_t vocab() const { return vocab_; }  ///< of the drafter's tokens, those drafted
  /// Rows of a draft in the pass behind `level` passes: 1 root; 0 where it has ended.
  std::int64_t rows(std::size_t draft, std::int64_t level) const;

  /// The likely tokens of rows of the runner's last pass, as numbers `first`, first + 1, ... of
  /// those that the step of `level` is about: of the roots, one a draft, and then of all levels'
  /// rows, draft by draft.
  void rank(std::span<const std::int64_t> rows, std::int64_t first, std::int64_t level);

  /// Where a draft's rows of the pass behind `level` passes are, and those of the next one.
  struct Place {
    std::int64_t first_row = 0;  ///< as rank() numbered it
    std::int64_t next_row = 0;
    std::int64_t scratch = 0;
    std::int64_t path = 0;
  };
  void set_step(std::size_t draft, std::int64_t level, const Place& place);
  /// What fills in the next pass's rows; `states`: what the rows of the last one gave out.
  LevelGrowth level(std::int64_t level, const float* states);
  /// The last level, and the trees. Waits.
  void finish(std::int64_t level, std::span<DraftTree* const> out);

 private:
  struct Sizes;
  std::int64_t begin_of(std::size_t draft, std::int64_t level) const;

  CudaRunner& runner_;
  const Rows kind_;
  const std::int64_t most_drafts_;
  const std::int64_t top_k_;
  const std::int64_t depth_;
  const std::int64_t target_vocab_;
  std::int64_t vocab_ = 0;
  std::int64_t width_ = 0;  // of a state
  std::vector<Draft> drafts_;
  bool unfinished_ = false;  // begun, and finish() has not waited
  CudaFavour favour_;        // a list is a level

  cuda::DeviceBuffer buffer_;
  cuda::LikelyToken* likely_ = nullptr;         // [drafts * top_k, top_k]
  float* scores_ = nullptr;                     // [drafts * top_k, top_k], where some sample
  cuda::GrownCandidate* candidates_ = nullptr;  // [drafts, most]
  std::int32_t* frontiers_ = nullptr;           // [drafts, top_k]
  cuda::GrowStep* steps_ = nullptr;             // [depth, drafts]
  cuda::GrownDraft* sizes_ = nullptr;           // [drafts]
  std::int32_t* out_ = nullptr;                 // see FinishDraftArgs
  cuda::HostBuffer host_steps_;                 // as steps_, then sizes_
  cuda::HostBuffer host_out_;
  std::int64_t sizes_at_ = 0;  // in host_steps_
};

}  // namespace specrt
