#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// Which of the target's hidden states a drafter reads, all as fp32.
struct SPECRT_API TargetFeatures {
  /// The residual stream as it enters these layers, which is what leaves the layer before: 0 are
  /// the embeddings, num_layers what leaves the last layer. In the order in which they are read.
  std::vector<std::int64_t> layers;
  bool normed = false;     ///< and, last, the final norm's output: what the output head reads
  bool last_only = false;  ///< of each round, its last processed token alone

  bool any() const { return normed || !layers.empty(); }
  std::int64_t count() const { return static_cast<std::int64_t>(layers.size()) + (normed ? 1 : 0); }
  /// Whether all that `other` reads is among these.
  bool cover(const TargetFeatures& other) const;
  /// Throws InvalidArgument for a layer outside [0, num_layers].
  void check(std::int64_t num_layers) const;
};

/// Whoever has features in a device's memory.
class SPECRT_API DeviceFeatures {
 public:
  /// Where the host finds what lies at `device`. The first call behind a pass copies and waits.
  virtual const float* on_host(const float* device) = 0;

 protected:
  ~DeviceFeatures() = default;
};

/// Features of consecutive committed tokens of one sequence, where the pass left them: valid
/// during the call that hands them over.
class FeatureRows {
 public:
  FeatureRows() = default;
  /// With a device, `parts` are in its memory.
  FeatureRows(std::span<const float* const> parts, std::span<const std::int64_t> rows,
              std::int64_t hidden, DeviceFeatures* device = nullptr)
      : parts_(parts), rows_(rows), hidden_(hidden), device_(device) {}

  std::int64_t size() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t width() const { return static_cast<std::int64_t>(parts_.size()) * hidden_; }
  /// One feature of token i, [hidden], by its place in the drafter's features().
  std::span<const float> part(std::int64_t i, std::int64_t which) const {
    const float* from = address(i, which);
    if (device_ != nullptr) from = device_->on_host(from);
    return {from, static_cast<std::size_t>(hidden_)};
  }
  /// All of them, one behind the other, [width].
  void copy(std::int64_t i, float* out) const {
    for (std::int64_t p = 0; p < static_cast<std::int64_t>(parts_.size()); ++p) {
      const std::span<const float> one = part(i, p);
      std::memcpy(out + p * hidden_, one.data(), one.size_bytes());
    }
  }

  /// For drafters that read them on the device: whose they are, else null; and where they lie.
  DeviceFeatures* device() const { return device_; }
  const float* address(std::int64_t i, std::int64_t which) const {
    return parts_[static_cast<std::size_t>(which)] + rows_[static_cast<std::size_t>(i)] * hidden_;
  }

 private:
  std::span<const float* const> parts_;
  std::span<const std::int64_t> rows_;
  std::int64_t hidden_ = 0;
  DeviceFeatures* device_ = nullptr;
};

/// What a round tells a drafter of one sequence.
struct ObservedFeatures {
  SequenceId id = 0;
  std::int64_t first = 0;  ///< position of the first of them
  FeatureRows rows;        ///< of positions first, first + 1, ...
  /// The sequence so far. It is longer than what has features: the token behind each is known.
  std::span<const TokenId> tokens;
};

}  // namespace specrt
