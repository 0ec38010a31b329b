#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "specrt/model.h"

namespace specrt {

/// How large each input of each matrix is, as far as the weights alone tell: mean squares, up to a
/// factor. Where few channels carry most of what a matrix reads, as in the residual stream of
/// nearly every trained model, rounding has to spare those.
///
/// Channels are taken to be independent. Then mean squares go through a layer by themselves: an
/// output's is the sum of weight^2 times its input's, a norm scales them to mean 1 and by weight^2,
/// attention averages values, and the MLP multiplies up with the activation of a normal gate. Only
/// + * / sqrt, in a fixed order, so that the same weights always give the same numbers.
class InputMoments {
 public:
  explicit InputMoments(const ModelConfig& config) : config_(config) {}

  /// Of matrix `name`; empty where nothing is known, as when tensors come in another order than a
  /// forward pass reads them, and for tensors that are no layer's matrices.
  std::vector<float> inputs_of(const std::string& name) const;

  /// Reads row r, of n, into k floats.
  using ReadRow = std::function<void(std::int64_t r, float* out)>;
  /// The next tensor, [n, k] or, with k = 1, [n].
  void observe(const std::string& name, std::int64_t n, std::int64_t k, const ReadRow& read);

 private:
  using Values = std::vector<double>;
  /// Sums of weight^2 times the inputs' mean squares, by row.
  Values outputs(std::int64_t n, std::int64_t k, const ReadRow& read, const Values& inputs) const;
  Values block_input(const Values& norm) const;
  Values attention_output() const;
  Values mlp_inner() const;
  void add_to_residual(Values output, const Values& post_norm);

  ModelConfig config_;
  Values residual_;  // empty: not known
  Values attention_norm_, attention_post_norm_, mlp_norm_, mlp_post_norm_;
  Values value_, gate_, up_;  // of the present layer
};

}  // namespace specrt
