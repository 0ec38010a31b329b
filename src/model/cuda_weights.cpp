#include "model/cuda_weights.h"

namespace specrt {

CudaLayout cuda_layout(const ModelConfig& config, Precision precision, int architecture) {
  return cuda_layout(weight_layout(config, precision).entries, config.intermediate_size,
                     architecture);
}

CudaWeights::CudaWeights(const Model& model, int architecture)
    : arena_(
          cuda_layout(model.config(), model.precision(), architecture),
          [&](const std::string& name, const std::byte** at) {
            return model.data().find_entry(name, at);
          },
          model.config().intermediate_size) {
  const ModelConfig& config = model.config();
  head_ = arena_.matrix("lm_head");
  embedding_ = arena_.find("embedding");
  norm_ = arena_.vector("norm");
  entrance_.fc = arena_.matrix("fc");
  entrance_.fc_bias = arena_.vector("fc.bias");
  entrance_.embedding_norm = arena_.vector("embedding_norm");
  entrance_.hidden_norm = arena_.vector("hidden_norm");
  entrance_.input_norm = arena_.vector("input_norm");
  for (std::int64_t p = 0; config.head.part_norms && p < config.head.feature_parts; ++p) {
    entrance_.part_norms.push_back(arena_.vector("part_norms." + std::to_string(p)));
  }
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    Layer layer;
    layer.attention_norm = arena_.vector(at + "attention_norm");
    layer.attention_post_norm = arena_.vector(at + "attention_post_norm");
    layer.q_norm = arena_.vector(at + "attention.q_norm");
    layer.k_norm = arena_.vector(at + "attention.k_norm");
    layer.qkv = arena_.matrix(at + "attention.qkv");
    layer.qkv_bias = arena_.vector(at + "attention.qkv.bias");
    layer.output = arena_.matrix(at + "attention.o");
    layer.output_bias = arena_.vector(at + "attention.o.bias");
    layer.mlp_norm = arena_.vector(at + "mlp_norm");
    layer.mlp_post_norm = arena_.vector(at + "mlp_post_norm");
    layer.gate_up = arena_.matrix(at + "mlp.gate_up");
    layer.gate_up_bias = arena_.vector(at + "mlp.gate_up.bias");
    layer.down = arena_.matrix(at + "mlp.down");
    layer.down_bias = arena_.vector(at + "mlp.down.bias");
    layers_.push_back(layer);
  }
}

std::shared_ptr<const CudaWeights> CudaWeights::of(const Model& model, int device) {
  DeviceCopies& copies = model.data().on_devices;
  const std::lock_guard lock(copies.mutex);
  std::weak_ptr<const CudaWeights>& kept = copies.by_device[device];
  std::shared_ptr<const CudaWeights> weights = kept.lock();
  if (weights == nullptr) {
    weights = std::make_shared<const CudaWeights>(model, cuda::architecture_of(device));
    kept = weights;
  }
  return weights;
}

}  // namespace specrt
