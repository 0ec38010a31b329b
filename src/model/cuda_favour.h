#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "model/logit_lists.h"
#include "ops.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

/// Which sequences rows of a drafter's logits belong to: what their penalties and masks do to them
/// (kernels/process_logits.h), and their tokens by the target's own noise where they sample
/// (kernels/favour.h). Rows are told of in lists, one a pass or a head.
///
/// For each batch: begin(); where it is wanted(), set_rows() of a list and send() of it; then
/// process() and favour() of its rows.
class CudaFavour {
 public:
  /// How much there is at most.
  struct Shape {
    std::int64_t sequences = 0;
    std::int64_t lists = 0;
    std::int64_t rows = 0;   ///< of a list
    std::int64_t slice = 0;  ///< rows that are run at once
    std::int64_t vocab = 0;  ///< the drafter's
    std::int64_t count = 0;  ///< tokens of a row
  };
  /// Whether a request's rows are ranked here: unless it samples by itself, has a law to tell, or
  /// its draft a say in its text, where the host's arithmetic and this one could give two.
  static bool ranks(const SamplingParams& params);

  /// What it takes beside lists. `target_vocab`: 0 where ids are the same.
  static std::int64_t device_bytes(const Shape& shape, std::int64_t target_vocab);
  /// `target_of_draft` may be empty: the drafter's ids are the target's. Waits.
  CudaFavour(const Shape& shape, std::span<const TokenId> target_of_draft,
             std::int64_t target_vocab, cuda::Stream stream);

  /// A sequence, and the position of its first drafted token.
  struct Sequence {
    const LogitLists* lists = nullptr;
    std::int64_t position = 0;
  };
  /// Takes device memory where there are longer lists than there have been; false where there is
  /// none left.
  bool begin(std::span<const Sequence> sequences);
  struct Kinds {
    bool greedy = true;     ///< some are
    bool sampled = false;   ///< some are not
    bool filtered = false;  ///< some of those have filters
    bool changed = false;   ///< some have penalties or masks
    bool operator==(const Kinds&) const = default;
    bool wanted() const { return sampled || changed; }
  };
  const Kinds& kinds() const { return kinds_; }

  /// Rows [first, first + count) of a list are of that sequence, for its drafted token number
  /// `depth`, from 0.
  void set_rows(std::int64_t list, std::int64_t first, std::int64_t count, std::size_t sequence,
                std::int64_t depth);
  /// They are of none.
  void set_padding(std::int64_t list, std::int64_t first, std::int64_t count);
  void send(std::int64_t list, std::int64_t lists = 1);

  /// Logits of rows [first, first + count) of a list, at most a slice.
  struct Rows {
    float* logits = nullptr;  ///< [count, stride]
    std::int64_t stride = 0;
    std::int64_t vocab = 0;  ///< that may be drafted
    std::int64_t list = 0;
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  /// Penalties and masks, in place; `trees` have the nodes that rows are told to be.
  void process(const Rows& rows, const cuda::DraftTrees& trees);
  /// `out` and `scores` are FavourArgs'; greedy sequences' rows of `out` have been ranked before.
  void favour(const Rows& rows, std::int64_t count, bool raw, cuda::LikelyToken* out,
              float* scores);

  /// A list's, to tell which nodes they are.
  cuda::LogitRow* rows(std::int64_t list) const { return rows_ + list * shape_.rows; }
  const std::int32_t* target_of_draft() const { return target_of_draft_; }
  /// The other way round, by target id: -1 where the drafter has none. Of the host; empty where ids
  /// are the same.
  std::span<const std::int32_t> draft_of_target() const { return draft_of_target_; }
  std::int64_t list_bytes() const { return static_cast<std::int64_t>(pool_.size()); }

 private:
  struct Sizes;
  bool grow_pool(std::int64_t bytes);
  cuda::LogitRow* host_row(std::int64_t list, std::int64_t row);

  const Shape shape_;
  const cuda::Stream stream_;
  Kinds kinds_;
  std::span<const Sequence> sequences_;
  std::vector<std::int32_t> draft_of_target_;

  cuda::DeviceBuffer buffer_;
  cuda::SamplingState* states_ = nullptr;  // [sequences]
  cuda::LogitRow* rows_ = nullptr;         // [lists, rows]
  cuda::ChunkTop* tops_ = nullptr;         // [slice, chunks], as are:
  cuda::ChunkShare* shares_ = nullptr;
  float* sums_ = nullptr;
  std::int32_t* found_ = nullptr;            // [slice, vocab]
  cuda::Cut* cuts_ = nullptr;                // [slice]
  cuda::FavouredToken* favoured_ = nullptr;  // [slice, chunks, count]
  const std::int32_t* target_of_draft_ = nullptr;
  const std::int32_t* device_draft_of_target_ = nullptr;
  cuda::DeviceBuffer pool_;  // of lists
  cuda::HostBuffer pool_staging_;
  std::int64_t refused_bytes_ =
      std::numeric_limits<std::int64_t>::max();  // that were not to be had
  cuda::HostBuffer staging_;                     // as states_, then rows_
  std::int64_t rows_at_ = 0;
};

}  // namespace specrt
