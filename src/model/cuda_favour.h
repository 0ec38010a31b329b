#pragma once

#include <cstdint>
#include <span>

#include "ops.h"
#include "specrt/sampling.h"
#include "specrt/types.h"

namespace specrt {

/// Which sequences rows of a drafter's logits belong to, and their tokens by the target's own noise
/// where those sample (kernels/favour.h). Rows are told of in lists, one a pass or a head.
///
/// For each batch: begin(); set_rows() of a list, send() of it, and then run() of its rows.
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
  /// Whether a request's rows are ranked here, or by log-probability alone: unless penalties, masks
  /// or a grammar change its logits, or it samples by itself.
  static bool ranks(const SamplingParams& params, bool neutral_logits);

  static std::int64_t device_bytes(const Shape& shape, bool mapped);
  /// `target_of_draft` may be empty: the drafter's ids are the target's. Waits.
  CudaFavour(const Shape& shape, std::span<const TokenId> target_of_draft, cuda::Stream stream);

  /// A sequence, and the position of its first drafted token.
  struct Sequence {
    const SamplingParams* params = nullptr;
    std::int64_t position = 0;
  };
  void begin(std::span<const Sequence> sequences);
  bool greedy() const { return greedy_; }    ///< whether some are
  bool sampled() const { return sampled_; }  ///< whether some are not; else nothing need be run
  bool filtered() const { return filtered_; }

  /// Rows [first, first + count) of a list are of that sequence, for its drafted token number
  /// `depth`, from 0.
  void set_rows(std::int64_t list, std::int64_t first, std::int64_t count, std::size_t sequence,
                std::int64_t depth);
  /// They are of none.
  void set_padding(std::int64_t list, std::int64_t first, std::int64_t count);
  void send(std::int64_t list, std::int64_t lists = 1);

  struct Logits {
    const float* at = nullptr;  ///< [rows, stride]
    std::int64_t stride = 0;
    std::int64_t vocab = 0;  ///< that may be drafted
  };
  /// Logits of rows [first, first + rows) of a list, at most a slice. `out` and `scores` are
  /// FavourArgs'; greedy sequences' rows of `out` have been ranked before.
  void run(const Logits& logits, std::int64_t list, std::int64_t first, std::int64_t rows,
           std::int64_t count, bool raw, cuda::LikelyToken* out, float* scores);

  const std::int32_t* target_of_draft() const { return target_of_draft_; }

 private:
  struct Sizes;
  cuda::LogitRow* host_row(std::int64_t list, std::int64_t row);

  const Shape shape_;
  const cuda::Stream stream_;
  bool greedy_ = false;
  bool sampled_ = false;
  bool filtered_ = false;
  std::span<const Sequence> sequences_;

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
  cuda::HostBuffer staging_;  // as states_, then rows_
  std::int64_t rows_at_ = 0;
};

}  // namespace specrt
