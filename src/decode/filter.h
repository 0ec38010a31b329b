#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "specrt/sampling.h"

namespace specrt {

/// What top_k, top_p and min_p leave of a row. Tokens rank by their logits, equal ones by the lower
/// id, and each filter keeps a head of that ranking. Where it ends is searched for by floors:
/// passes over the row that count, or weigh, what lies above one. Nothing is sorted, and the floors
/// depend on the row alone.
class Filter {
 public:
  Filter(const cpu::Kernels& kernels, std::int64_t vocab_size);

  static bool wanted(const SamplingParams& params, std::int64_t vocab_size);

  /// `weights` are exp((x - max) / T) and `sum` is their sum. Tokens of no weight may be left out.
  void apply(std::span<const float> logits, std::span<const float> weights, float max, double sum,
             const SamplingParams& params);
  /// The ids that are left, ascending, and their weights.
  std::span<const std::int32_t> ids() const { return {ids_.data(), count_}; }
  std::span<const float> weights() const { return {weights_.data(), count_}; }

  /// The `count` highest logits, in order. Valid until the next call.
  std::span<const std::int32_t> most_likely(std::span<const float> logits, float max,
                                            std::int64_t count);

  static std::int64_t bytes_for(std::int64_t vocab_size);

 private:
  /// Entries in id order. No ids: an entry's place is its id.
  struct Row {
    const float* logits;
    const float* weights;
    const std::int32_t* ids;
    std::int64_t size;
  };
  /// The entries whose value is at least `floor`; of those equal to it only the first `ties`,
  /// unless negative. No values: all entries that have a weight.
  struct Cut {
    const float* values;
    float floor;
    std::int64_t ties = -1;
  };
  Cut find(const float* logits, const float* weights, std::int64_t size, float max, float scale,
           double wanted);
  void take(const Row& row, const Cut& cut);
  std::span<const std::int32_t> pick(const float* values, std::int64_t size, float low, float high);

  const cpu::Kernels* kernels_;
  std::size_t count_ = 0;
  std::vector<std::int32_t> ids_;  // what is left: count_ of it
  std::vector<float> logits_;
  std::vector<float> weights_;
  std::vector<std::int32_t> picked_;  // places in the row at hand
  std::vector<float> near_logits_;    // where the search for a floor goes on
  std::vector<float> near_weights_;
};

}  // namespace specrt
