#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench_support.h"
#include "model/runner.h"
#include "specrt/model.h"

namespace bench {

/// A model of a known shape with random weights.
inline specrt::Model random_model(const Shape& s, specrt::Precision precision) {
  using namespace specrt;
  ModelConfig c;
  c.family = s.name;
  c.vocab_size = s.vocab;
  c.hidden_size = s.hidden;
  c.intermediate_size = s.ffn;
  c.num_layers = s.layers;
  c.num_heads = s.heads;
  c.num_kv_heads = s.kv_heads;
  c.head_dim = s.head_dim;
  c.max_position_embeddings = 65536;
  c.tied_embeddings = s.tied;
  for (std::int64_t i = 0; i < s.head_dim / 2; ++i) {
    c.rope_inv_freq.push_back(1.0f / static_cast<float>(1 + i * i));
  }
  ModelBuilder builder(c, precision);
  std::vector<std::uint16_t> values;
  std::uint64_t state = 1;
  for (const TensorSpec& tensor : tensors_of(c)) {
    std::int64_t size = 1;
    for (const std::int64_t n : tensor.shape) size *= n;
    values.resize(static_cast<std::size_t>(size));
    for (std::uint16_t& value : values) {
      // Random signs and mantissas around 0.02; norms are ones.
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = tensor.shape.size() == 1
                  ? 0x3F80
                  : static_cast<std::uint16_t>((state >> 48 & 0x807Fu) | 0x3C80u);
    }
    builder.set(tensor.name, tensor.shape, DType::bf16, values.data());
  }
  return builder.build();
}

/// A runner whose sequence 0 has `context` tokens in its cache, with room for drafts behind them.
inline std::unique_ptr<specrt::Runner> runner_behind(const specrt::Model& model, const Shape& shape,
                                                     const std::string& isa, int threads,
                                                     std::int64_t context) {
  using namespace specrt;
  RunnerOptions options;
  options.kv_cache_bytes = std::int64_t{1} << 30;
  options.max_model_len = context + 128;
  options.max_rows = 128;
  options.team = std::make_shared<ThreadTeam>(threads);
  options.cpu_isa = isa;
  auto made = std::make_unique<Runner>(model, options);
  Runner& runner = *made;
  const cpu::FpMode mode;
  runner.cache().add(0, context + 100);
  std::vector<TokenId> tokens(static_cast<std::size_t>(context));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<TokenId>(i * 7919 % static_cast<std::size_t>(shape.vocab));
  }
  for (std::int64_t done = 0; done < context;) {
    const std::int64_t count = std::min<std::int64_t>(128, context - done);
    runner.begin();
    runner.add_committed(0, std::span(tokens).subspan(static_cast<std::size_t>(done),
                                                      static_cast<std::size_t>(count)));
    runner.forward();
    runner.advance(0, count);
    done += count;
  }
  return made;
}

}  // namespace bench
