#pragma once

// Models of a few thousand weights, made from a seed: what the native tests run.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "specrt/model.h"

namespace tiny {

/// Whether large matrices of cases are thinned out (instrumented builds).
#if defined(SPECRT_TESTS_THINNED)
inline constexpr bool kThinned = true;
#else
inline constexpr bool kThinned = false;
#endif

struct Spec {
  std::int64_t layers = 2;
  std::int64_t hidden = 64;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 16;
  std::int64_t ffn = 128;
  std::int64_t vocab = 128;
  std::int64_t max_positions = 512;
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool tied = false;
  double attention_scale = 0.0;
  double rope_scale = 1.0;
  specrt::Precision dtype = specrt::Precision::f32;
  std::uint64_t seed = 1;
  double head_scale = 4.0;  ///< standard deviation of the logits: how clear the winner is
  bool twins = false;       ///< head rows 2i and 2i + 1 are the same: every winner is a tie
  double twin_gap = 0.0;    ///< with twins: the odd one's row is (1 + twin_gap) times the other
};

/// A tensor's values by canonical name.
using Tensors = std::map<std::string, std::vector<float>>;

specrt::ModelConfig config_of(const Spec& spec);
Tensors random_tensors(const Spec& spec);
specrt::Model build(const specrt::ModelConfig& config, specrt::Precision dtype,
                    const Tensors& tensors);
specrt::Model random_model(const Spec& spec);

/// The smallest model that still has everything: several layers, grouped heads, a cache.
Spec small_spec(specrt::Precision dtype = specrt::Precision::f32, std::uint64_t seed = 1);

/// The next token's logits depend on the last token only: logits[last][next]. Exact up to the
/// rounding of one norm and one product; blind to everything in the cache.
specrt::Model bigram_model(const std::vector<std::vector<float>>& logits,
                           std::int64_t max_positions = 512,
                           specrt::Precision dtype = specrt::Precision::f32);

/// next = last + step modulo vocab, beyond doubt: every output is known by arithmetic.
specrt::Model counter_model(std::int64_t vocab = 16, std::int64_t max_positions = 512,
                            std::int64_t step = 1);

/// `size` tokens below `vocab`, from a seed.
std::vector<specrt::TokenId> random_tokens(std::uint64_t seed, std::size_t size,
                                           std::int64_t vocab);

}  // namespace tiny
