#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/kv_cache.h"
#include "ops.h"
#include "specrt/types.h"

namespace specrt {

/// A level of drafts that grow on the device (cuda_growth.h), but for the pass's inputs.
struct LevelGrowth {
  cuda::GrowArgs args;
  std::int64_t drafts = 0;
};

/// The rows of a pass, as a Runner has laid them out.
struct PassRows {
  std::int64_t rows = 0;
  std::span<const TokenId> tokens;
  std::span<const std::int32_t> positions;
  std::span<const std::vector<std::int32_t>> slots;  ///< by group
  std::span<const SequenceId> owners;
  std::span<const std::int64_t> path_begin;
  std::span<const std::int64_t> path_length;
  std::span<const std::int32_t> paths;
  bool captures = false;  ///< hidden states are kept
  // Of a draft head, on the device; null ones are none.
  std::span<const float* const> hidden;
  std::span<float* const> outputs;
  const LevelGrowth* growth = nullptr;  ///< what these rows are, where the device alone knows
};

/// The sizes that a captured pass has; its real rows are no more than these.
struct PassShape {
  std::int64_t rows = 0;
  std::int64_t units = 0;
  std::int64_t segments = 1;
  bool operator==(const PassShape&) const = default;
};

/// What a pass reads beside weights and cache, in one copy to the device. Where a section lies
/// follows from the shape, so that a graph finds it again.
class CudaInputs {
 public:
  /// Longest path of a draft node; deeper ones are not drafted.
  static constexpr std::int64_t kMostDepth = 256;

  /// `states`: rows have hidden states that they read and write, a draft head's.
  CudaInputs(const KvLayout& layout, std::int64_t max_rows, std::int64_t max_batch_size,
             std::int64_t longest_in_blocks, std::int64_t group_heads, bool states);
  static std::int64_t bytes(const KvLayout& layout, std::int64_t max_rows,
                            std::int64_t max_batch_size, std::int64_t longest_in_blocks,
                            bool states);

  std::int64_t device_bytes() const { return static_cast<std::int64_t>(device_.size()); }

  /// Rows that a pass of so many is filled up to: those of a graph, or, of many rows, themselves.
  static std::int64_t rows_of(std::int64_t rows);
  static constexpr std::int64_t kMostCaptured = 256;

  /// Writes the pass and puts its copy on the stream. Throws CapacityError where it has more blocks
  /// or deeper paths than there is room for.
  void send(const PassRows& pass, const KvCache& cache, cuda::Stream stream);

  /// Puts on the stream what writes tokens, states and paths of rows that were sent without.
  void grow(const LevelGrowth& growth, cuda::Stream stream) const;

  const PassShape& shape() const { return shape_; }
  const std::int32_t* tokens() const { return at<std::int32_t>(0); }
  const std::int32_t* positions() const { return at<std::int32_t>(positions_); }
  const std::int64_t* slots(std::int64_t group) const {
    return at<std::int64_t>(slots_) + group * shape_.rows;
  }
  const cuda::AttentionRow* rows(std::int64_t group) const {
    return at<cuda::AttentionRow>(rows_) + group * shape_.rows;
  }
  const cuda::AttentionUnit* units() const { return at<cuda::AttentionUnit>(units_); }
  /// PassRows::hidden and outputs.
  const float* const* hidden() const { return at<const float*>(hidden_); }
  float* const* outputs() const { return at<float*>(hidden_) + shape_.rows; }
  /// Of the pass that was sent last, on the host: to cut attention where partial results are many.
  std::span<const cuda::AttentionUnit> host_units() const { return host_units_; }
  /// Block tables, and paths behind them.
  const std::int32_t* pool() const { return at<std::int32_t>(pool_); }

 private:
  template <typename T>
  const T* at(std::int64_t offset) const {
    return reinterpret_cast<const T*>(device_.data() + offset);
  }
  void lay_out();

  std::int64_t groups_;
  std::vector<std::int64_t> windows_;
  std::int64_t unit_rows_;
  bool states_;
  PassShape shape_;
  std::int64_t positions_ = 0;
  std::int64_t slots_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t units_ = 0;
  std::int64_t hidden_ = 0;
  std::int64_t pool_ = 0;
  std::int64_t pool_room_ = 0;  // entries
  std::vector<cuda::AttentionUnit> host_units_;
  cuda::DeviceBuffer device_;
  // In turn, so that one can be written while the other may still be on its way.
  cuda::HostBuffer staging_[2];
  cuda::Event sent_[2];
  int turn_ = 0;
};

}  // namespace specrt
