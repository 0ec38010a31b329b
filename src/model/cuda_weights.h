#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/cuda_arena.h"
#include "specrt/model.h"

namespace specrt {

/// A model's, which follows from config, precision and architecture alone.
CudaLayout cuda_layout(const ModelConfig& config, Precision precision, int architecture);

/// A model's weights on the device, in the order in which its kernels read them.
class CudaWeights {
 public:
  struct Layer {
    const float* attention_norm = nullptr;
    const float* attention_post_norm = nullptr;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
    cuda::DeviceMatrix qkv;
    const float* qkv_bias = nullptr;
    cuda::DeviceMatrix output;
    const float* output_bias = nullptr;
    const float* mlp_norm = nullptr;
    const float* mlp_post_norm = nullptr;
    cuda::DeviceMatrix gate_up;
    const float* gate_up_bias = nullptr;
    cuda::DeviceMatrix down;
    const float* down_bias = nullptr;
  };

  /// Copies them to the thread's device, a share at a time. Throws CapacityError where they do not
  /// fit.
  CudaWeights(const Model& model, int architecture);
  /// A model's weights on that device, which is the thread's: those that are there already, where
  /// somebody has them.
  static std::shared_ptr<const CudaWeights> of(const Model& model, int device);

  std::int64_t bytes() const { return arena_.bytes(); }
  const Layer& layer(std::int64_t index) const { return layers_[static_cast<std::size_t>(index)]; }
  /// Without data where a draft head has none of its own.
  const cuda::DeviceMatrix& head() const { return head_; }
  /// [vocab, hidden] row-major; null where the head doubles as the table, or is another model's.
  const void* embedding() const { return embedding_; }
  const float* norm() const { return norm_; }
  /// How hidden states come into a draft head; what it has not is null.
  struct Entrance {
    cuda::DeviceMatrix fc;
    const float* fc_bias = nullptr;
    const float* embedding_norm = nullptr;
    const float* hidden_norm = nullptr;
    const float* input_norm = nullptr;
    std::vector<const float*> part_norms;
  };
  const Entrance& entrance() const { return entrance_; }

 private:
  CudaArena arena_;
  std::vector<Layer> layers_;
  cuda::DeviceMatrix head_;
  Entrance entrance_;
  const void* embedding_ = nullptr;
  const float* norm_ = nullptr;
};

}  // namespace specrt
