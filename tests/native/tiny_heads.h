#pragma once

// Draft heads for the models of tiny_model.h.

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "specrt/drafter.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace tiny {

/// A random head of one layer for targets of `spec`; `change` makes it another one.
inline specrt::Model random_head(
    const Spec& spec, specrt::HeadKind kind, specrt::Precision dtype, double scale = 1.0,
    std::uint64_t seed = 9,
    const std::function<void(specrt::ModelConfig&)>& change = [](specrt::ModelConfig&) {}) {
  specrt::ModelConfig config = config_of(spec);
  config.num_layers = 1;
  config.tied_embeddings = false;
  config.head.kind = kind;
  config.head.input_vocab = spec.vocab;
  config.head.feature_size = spec.hidden;
  config.head.feature_parts = kind == specrt::HeadKind::beside ? 2 : 1;
  config.head.first_norm = false;
  config.head.final_norm = kind == specrt::HeadKind::beside;
  config.head.own_embedding = false;
  config.head.own_lm_head = false;
  change(config);
  specrt::ModelBuilder builder(config, dtype);
  for (const specrt::TensorSpec& tensor : specrt::tensors_of(config)) {
    std::int64_t count = 1;
    for (const std::int64_t size : tensor.shape) count *= size;
    std::vector<float> values;
    const Tokens noise = random_tokens(seed++, static_cast<std::size_t>(count), 2001);
    for (const TokenId one : noise) {
      const double unit = (one - 1000) / 577.0;  // of variance 1
      values.push_back(
          static_cast<float>(tensor.shape.size() == 1
                                 ? 1.0 + 0.1 * unit
                                 : scale * unit / std::sqrt(static_cast<double>(tensor.shape[1]))));
    }
    builder.set(tensor.name, tensor.shape, specrt::DType::f32, values.data());
  }
  return builder.build();
}

/// So many different modules, each over the states of the one before.
inline std::vector<specrt::Model> random_modules(const Spec& spec, specrt::Precision dtype,
                                                 std::int64_t count) {
  std::vector<specrt::Model> out;
  for (std::int64_t k = 0; k < count; ++k) {
    const auto seed = 9 + 100 * static_cast<std::uint64_t>(k);
    out.push_back(random_head(spec, specrt::HeadKind::fused, dtype, 1.0, seed));
  }
  return out;
}

inline specrt::DraftHeadOptions head_options(specrt::HeadKind kind, std::int64_t top_k,
                                             std::int64_t depth) {
  specrt::DraftHeadOptions options;
  options.kv_cache_bytes = 1 << 21;
  options.threads = 1;
  options.check_invariants = true;
  options.block_size = 4;
  options.top_k = top_k;
  options.depth = depth;
  if (kind == specrt::HeadKind::beside) {
    options.features.layers = {0, 2};
  } else {
    options.features.normed = true;
  }
  return options;
}

}  // namespace tiny
