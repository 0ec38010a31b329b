#include "tiny_model.h"

#include <cmath>
#include <numbers>
#include <random>

namespace tiny {

using specrt::Model;
using specrt::ModelConfig;
using specrt::Precision;

ModelConfig config_of(const Spec& spec) {
  ModelConfig config;
  config.family = "tiny";
  config.vocab_size = spec.vocab;
  config.hidden_size = spec.hidden;
  config.intermediate_size = spec.ffn;
  config.num_layers = spec.layers;
  config.num_heads = spec.heads;
  config.num_kv_heads = spec.kv_heads;
  config.head_dim = spec.head_dim;
  config.max_position_embeddings = spec.max_positions;
  config.attention_scale = spec.attention_scale;
  config.rope_scale = spec.rope_scale;
  config.qkv_bias = spec.qkv_bias;
  config.output_bias = spec.output_bias;
  config.mlp_bias = spec.mlp_bias;
  config.tied_embeddings = spec.tied;
  for (std::int64_t i = 0; i < spec.head_dim / 2; ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(spec.head_dim);
    config.rope_inv_freq.push_back(static_cast<float>(std::pow(10000.0, -exponent)));
  }
  return config;
}

namespace {

// The standard's own distributions differ between libraries; this one does not.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : random_(seed) {}
  double operator()() {
    const double u = (static_cast<double>(random_() >> 11) + 0.5) * 0x1p-53;
    const double v = static_cast<double>(random_() >> 11) * 0x1p-53;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
  }

 private:
  std::mt19937_64 random_;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::int64_t count_of(const specrt::TensorSpec& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= size;
  return count;
}

}  // namespace

Tensors random_tensors(const Spec& spec) {
  Normal normal(spec.seed);
  Tensors tensors;
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config_of(spec))) {
    std::vector<float>& values = tensors[tensor.name];
    values.resize(static_cast<std::size_t>(count_of(tensor)));
    double mean = 0.0;
    double scale = 0.1;
    if (ends_with(tensor.name, "norm")) {
      mean = 1.0;
    } else if (tensor.name == "embedding") {
      scale = spec.tied ? spec.head_scale / std::sqrt(static_cast<double>(spec.hidden)) : 1.0;
    } else if (tensor.shape.size() == 2) {
      scale = (tensor.name == "lm_head" ? spec.head_scale : 1.0) /
              std::sqrt(static_cast<double>(tensor.shape[1]));
    }
    for (float& value : values) value = static_cast<float>(mean + scale * normal());
  }
  if (spec.twins) {
    std::vector<float>& head = tensors.at(spec.tied ? "embedding" : "lm_head");
    const auto width = static_cast<std::size_t>(spec.hidden);
    for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(spec.vocab); i += 2) {
      for (std::size_t k = 0; k < width; ++k) {
        head[(i + 1) * width + k] = static_cast<float>(head[i * width + k] * (1.0 + spec.twin_gap));
      }
    }
  }
  return tensors;
}

Model build(const ModelConfig& config, Precision dtype, const Tensors& tensors) {
  specrt::ModelBuilder builder(config, dtype);
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
    builder.set(tensor.name, tensor.shape, specrt::DType::f32, tensors.at(tensor.name).data());
  }
  return builder.build();
}

Model random_model(const Spec& spec) {
  return build(config_of(spec), spec.dtype, random_tensors(spec));
}

Spec small_spec(Precision dtype, std::uint64_t seed) {
  Spec spec;
  spec.hidden = 32;
  spec.head_dim = 8;
  spec.ffn = 48;
  spec.vocab = 61;  // no multiple of anything
  spec.max_positions = 256;
  spec.dtype = dtype;
  spec.seed = seed;
  return spec;
}

Model bigram_model(const std::vector<std::vector<float>>& logits, std::int64_t max_positions,
                   Precision dtype) {
  Spec spec;
  spec.vocab = static_cast<std::int64_t>(logits.size());
  spec.hidden = spec.vocab;
  spec.layers = 1;
  spec.ffn = 16;
  spec.max_positions = max_positions;
  Tensors tensors = random_tensors(spec);
  for (auto& [name, values] : tensors) {
    if (ends_with(name, "norm")) values.assign(values.size(), 1.0f);
    if (ends_with(name, "attention.o") || ends_with(name, "mlp.down")) {
      values.assign(values.size(), 0.0f);
    }
  }
  const auto vocab = static_cast<std::size_t>(spec.vocab);
  // The norm turns a one-hot row into sqrt(vocab) times itself.
  const float norm = std::sqrt(static_cast<float>(spec.vocab));
  for (std::size_t last = 0; last < vocab; ++last) {
    for (std::size_t next = 0; next < vocab; ++next) {
      tensors["embedding"][last * vocab + next] = last == next ? 1.0f : 0.0f;
      tensors["lm_head"][next * vocab + last] = logits[last][next] / norm;
    }
  }
  return build(config_of(spec), dtype, tensors);
}

Model counter_model(std::int64_t vocab, std::int64_t max_positions, std::int64_t step) {
  const auto size = static_cast<std::size_t>(vocab);
  std::vector<std::vector<float>> logits(size, std::vector<float>(size, 0.0f));
  for (std::int64_t last = 0; last < vocab; ++last) {
    logits[static_cast<std::size_t>(last)][static_cast<std::size_t>((last + step) % vocab)] = 40.0f;
  }
  return bigram_model(logits, max_positions);
}

std::vector<specrt::TokenId> random_tokens(std::uint64_t seed, std::size_t size,
                                           std::int64_t vocab) {
  std::mt19937_64 random(seed);
  std::vector<specrt::TokenId> tokens(size);
  for (specrt::TokenId& token : tokens) {
    token = static_cast<specrt::TokenId>(random() % static_cast<std::uint64_t>(vocab));
  }
  return tokens;
}

}  // namespace tiny
