#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "model/weights.h"
#include "specrt/error.h"
#include "specrt/model.h"

namespace specrt {

void ModelConfig::check() const {
  const auto at_least = [](const char* field, std::int64_t value, std::int64_t least) {
    if (value < least) {
      throw InvalidArgument(
          expected_got(field, "at least " + std::to_string(least), std::to_string(value)));
    }
  };
  at_least("vocab_size", vocab_size, 1);
  at_least("hidden_size", hidden_size, 1);
  at_least("intermediate_size", intermediate_size, 1);
  at_least("num_layers", num_layers, 1);
  at_least("num_heads", num_heads, 1);
  at_least("num_kv_heads", num_kv_heads, 1);
  at_least("head_dim", head_dim, 2);
  at_least("max_position_embeddings", max_position_embeddings, 1);
  // Wide enough for anything real, and the byte counts of a damaged file cannot overflow.
  const auto at_most = [](const char* field, std::int64_t value, std::int64_t most) {
    if (value > most) {
      throw InvalidArgument(
          expected_got(field, "at most " + std::to_string(most), std::to_string(value)));
    }
  };
  at_most("vocab_size", vocab_size, INT32_MAX);
  at_most("hidden_size", hidden_size, 1 << 20);
  at_most("intermediate_size", intermediate_size, 1 << 22);
  at_most("num_layers", num_layers, 4096);
  at_most("num_heads", num_heads, 1 << 16);
  at_most("max_position_embeddings", max_position_embeddings, INT32_MAX);
  if (head_dim % 2 != 0 || head_dim > 512) {
    throw InvalidArgument(
        expected_got("head_dim", "an even number of at most 512", std::to_string(head_dim)));
  }
  if (num_heads % num_kv_heads != 0 || num_heads / num_kv_heads > 64) {
    throw InvalidArgument(expected_got(
        "num_kv_heads",
        "a divisor of num_heads = " + std::to_string(num_heads) + ", at most 64 query heads each",
        std::to_string(num_kv_heads)));
  }
  const auto check_rope = [&](const char* field, const std::vector<float>& factors) {
    if (factors.empty() || static_cast<std::int64_t>(factors.size()) > head_dim / 2) {
      throw InvalidArgument(expected_got(
          field, "from 1 to head_dim / 2 = " + std::to_string(head_dim / 2) + " values",
          std::to_string(factors.size())));
    }
    for (const float value : factors) {
      if (!std::isfinite(value)) {
        throw InvalidArgument(expected_got(field, "finite values", std::to_string(value)));
      }
    }
  };
  check_rope("rope_inv_freq", rope_inv_freq);
  if (!rope_local_inv_freq.empty()) {
    check_rope("rope_local_inv_freq", rope_local_inv_freq);
    if (rope_local_inv_freq.size() != rope_inv_freq.size()) {
      throw InvalidArgument(
          expected_got("rope_local_inv_freq",
                       "as many values as rope_inv_freq, " + std::to_string(rope_inv_freq.size()),
                       std::to_string(rope_local_inv_freq.size())));
    }
  }
  if (!windows.empty() && static_cast<std::int64_t>(windows.size()) != num_layers) {
    throw InvalidArgument(expected_got("windows",
                                       "none or one a layer, " + std::to_string(num_layers),
                                       std::to_string(windows.size())));
  }
  for (const std::int64_t window : windows) {
    if (window < 0) {
      throw InvalidArgument(expected_got("windows", "at least 0", std::to_string(window)));
    }
  }
  for (const auto& [field, value] : {std::pair{"norm_eps", norm_eps},
                                     {"attention_scale", attention_scale},
                                     {"rope_scale", rope_scale},
                                     {"attention_softcap", attention_softcap},
                                     {"final_softcap", final_softcap},
                                     {"embedding_scale", embedding_scale},
                                     {"residual_scale", residual_scale},
                                     {"logits_scale", logits_scale}}) {
    if (!std::isfinite(value) || value < 0) {
      throw InvalidArgument(
          expected_got(field, "a finite number of at least 0", std::to_string(value)));
    }
  }
  if (head.kind != HeadKind::none) {
    at_least("head.input_vocab", head.input_vocab, 1);
    at_most("head.input_vocab", head.input_vocab, INT32_MAX);
    at_least("head.feature_parts", head.feature_parts, 1);
    at_most("head.feature_parts", head.feature_parts, 4096);
    at_least("head.feature_size", head.feature_size, 1);
    at_most("head.feature_size", head.feature_size, 1 << 20);
    // What it gives has to do for what it reads.
    const bool as_it_is = head.kind == HeadKind::fused || !head.fc;
    if (as_it_is && (head.feature_parts != 1 || head.feature_size != hidden_size)) {
      throw InvalidArgument(expected_got(
          "head.feature_size", "one hidden state of hidden_size = " + std::to_string(hidden_size),
          std::to_string(head.feature_parts) + " of " + std::to_string(head.feature_size)));
    }
    if (head.norm_output && !head.final_norm) {
      throw InvalidArgument("[head.norm_output] expected a final norm, got none");
    }
    if (tied_embeddings ||
        (head.kind == HeadKind::beside && norm_placement != NormPlacement::pre)) {
      throw InvalidArgument(
          "[head] expected untied embeddings, and norms before the blocks, got others");
    }
  }
  for (const TokenId token : eos_token_ids) {
    if (token < 0) {
      throw InvalidArgument(
          expected_got("eos_token_ids", "ids of at least 0", std::to_string(token)));
    }
  }
}

namespace {

std::int64_t aligned_bytes(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

class LayoutMaker {
 public:
  LayoutMaker(const ModelConfig& config, Precision precision)
      : config_(config), precision_(precision) {}

  WeightLayout make() {
    const std::int64_t hidden = config_.hidden_size;
    const std::int64_t q = config_.num_heads * config_.head_dim;
    const std::int64_t kv = config_.num_kv_heads * config_.head_dim;
    const std::int64_t ffn = config_.intermediate_size;
    const HeadConfig& draft = config_.head;
    const bool drafts = draft.kind != HeadKind::none;
    const bool beside = draft.kind == HeadKind::beside;
    if (drafts) {
      head_input(draft, hidden);
    } else if (config_.tied_embeddings) {
      packed("lm_head", config_.vocab_size, hidden, head_precision());
      part("embedding", "lm_head", {}, {config_.vocab_size, hidden});
    } else {
      rows("embedding", config_.vocab_size, hidden);
      part("embedding", "embedding", {}, {config_.vocab_size, hidden});
    }
    for (std::int64_t i = 0; i < config_.num_layers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      const bool pre = config_.norm_placement != NormPlacement::post;
      const bool post = config_.norm_placement != NormPlacement::pre;
      const bool bare = draft.kind == HeadKind::fused && i == 0 && !draft.first_norm;
      if (pre && !bare) whole_vector(layer + "attention_norm", hidden);
      if (post) whole_vector(layer + "attention_post_norm", hidden);
      fused(layer + "attention.qkv", beside && i == 0 ? 2 * hidden : hidden, config_.qkv_bias,
            {{layer + "attention.q", q}, {layer + "attention.k", kv}, {layer + "attention.v", kv}});
      fused(layer + "attention.o", q, config_.output_bias, {{layer + "attention.o", hidden}});
      if (config_.qk_norm != QkNorm::none) {
        const bool head = config_.qk_norm == QkNorm::head;
        whole_vector(layer + "attention.q_norm", head ? config_.head_dim : q);
        whole_vector(layer + "attention.k_norm", head ? config_.head_dim : kv);
      }
      if (pre) whole_vector(layer + "mlp_norm", hidden);
      if (post) whole_vector(layer + "mlp_post_norm", hidden);
      gated(layer + "mlp.gate_up", ffn, hidden, config_.mlp_bias,
            {layer + "mlp.gate", layer + "mlp.up"});
      fused(layer + "mlp.down", ffn, config_.mlp_bias, {{layer + "mlp.down", hidden}});
    }
    if (!drafts || draft.final_norm) whole_vector("norm", hidden);
    if (drafts ? draft.own_lm_head : !config_.tied_embeddings) {
      packed("lm_head", config_.vocab_size, hidden, head_precision());
      part("lm_head", "lm_head", {}, {config_.vocab_size, hidden});
    }
    return std::move(layout_);
  }

 private:
  void head_input(const HeadConfig& head, std::int64_t hidden) {
    if (head.own_embedding) {
      rows("embedding", head.input_vocab, hidden);
      part("embedding", "embedding", {}, {head.input_vocab, hidden});
    }
    const std::int64_t features = head.feature_parts * head.feature_size;
    const bool beside = head.kind == HeadKind::beside;
    if (!beside && head.embedding_norm) whole_vector("embedding_norm", hidden);
    if (beside || head.hidden_norm) whole_vector("hidden_norm", hidden);
    if (beside && head.input_norm) whole_vector("input_norm", features);
    for (std::int64_t p = 0; beside && head.part_norms && p < head.feature_parts; ++p) {
      whole_vector("part_norms." + std::to_string(p), head.feature_size);
    }
    if (!beside || head.fc) {
      fused("fc", beside ? features : hidden + features, head.fc_bias, {{"fc", hidden}});
    }
  }
  void add(const std::string& name, WeightEntry entry) {
    entry.offset = layout_.bytes;
    layout_.bytes += aligned_bytes(entry.bytes);
    layout_.entries.emplace(name, entry);
  }
  // A mistake in the head costs more than one elsewhere, and embeddings are often read from it.
  Precision head_precision() const {
    const bool coarse = precision_ == Precision::int4 || precision_ == Precision::w8a8;
    return coarse ? Precision::int8 : precision_;
  }
  void packed(const std::string& name, std::int64_t n, std::int64_t k, Precision precision) {
    add(name, {WeightEntry::Kind::packed, n, k, precision, 0, cpu::packed_bytes(n, k, precision)});
  }
  void rows(const std::string& name, std::int64_t n, std::int64_t k) {
    const DType dtype = activation_dtype(precision_);
    const Precision stored = dtype == DType::f32   ? Precision::f32
                             : dtype == DType::f16 ? Precision::f16
                                                   : Precision::bf16;
    add(name, {WeightEntry::Kind::rows, n, k, stored, 0,
               n * k * static_cast<std::int64_t>(size_of(dtype))});
  }
  void vector(const std::string& name, std::int64_t n) {
    add(name, {WeightEntry::Kind::vector, n, 1, Precision::f32, 0, n * 4});
  }
  void part(const std::string& tensor, const std::string& entry, cpu::PackedRows rows,
            std::vector<std::int64_t> shape) {
    layout_.targets.emplace(tensor, TensorTarget{entry, rows, std::move(shape)});
  }
  void whole_vector(const std::string& name, std::int64_t n) {
    vector(name, n);
    part(name, name, {}, {n});
  }
  // Matrices that read the same input are one matrix: one pass over the activations.
  void fused(const std::string& entry, std::int64_t k, bool bias,
             const std::vector<std::pair<std::string, std::int64_t>>& parts) {
    std::int64_t n = 0;
    for (const auto& [name, outputs] : parts) {
      part(name, entry, {n}, {outputs, k});
      if (bias) part(name + ".bias", entry + ".bias", {n}, {outputs});
      n += outputs;
    }
    packed(entry, n, k, precision_);
    if (bias) vector(entry + ".bias", n);
  }
  // Two matrices whose panels take turns: who computes one of a pair computes the other.
  void gated(const std::string& entry, std::int64_t outputs, std::int64_t k, bool bias,
             const std::array<std::string, 2>& parts) {
    for (std::int64_t i = 0; i < 2; ++i) {
      const std::string& name = parts[static_cast<std::size_t>(i)];
      part(name, entry, {0, 2, i}, {outputs, k});
      if (bias) part(name + ".bias", entry + ".bias", {0, 2, i}, {outputs});
    }
    const std::int64_t n = (outputs + cpu::kPanel - 1) / cpu::kPanel * cpu::kPanel * 2;
    packed(entry, n, k, precision_);
    if (bias) vector(entry + ".bias", n);
  }

  const ModelConfig& config_;
  Precision precision_;
  WeightLayout layout_;
};

}  // namespace

std::int64_t head_inputs(const ModelConfig& config) {
  const HeadConfig& head = config.head;
  if (head.kind == HeadKind::none) return 0;
  const std::int64_t features = head.feature_parts * head.feature_size;
  if (head.kind == HeadKind::fused) return config.hidden_size + features;
  return std::max(2 * config.hidden_size, head.fc ? features : 0);
}

WeightLayout weight_layout(const ModelConfig& config, Precision precision) {
  config.check();
  const std::int64_t widest = std::max({config.hidden_size, config.intermediate_size,
                                        config.num_heads * config.head_dim, head_inputs(config)});
  // Sums of products of int8 have to fit 32 bits.
  if (precision == Precision::w8a8 && widest > std::int64_t{1} << 17) {
    throw UnsupportedError(
        expected_got("w8a8", "layers of at most 131072 inputs", std::to_string(widest)));
  }
  return LayoutMaker(config, precision).make();
}

WeightLayout layout_beside(WeightLayout layout, const WeightLayout& other) {
  std::erase_if(layout.entries, [&](const auto& named) {
    const auto& [name, entry] = named;
    const auto found = other.entries.find(name);
    return found != other.entries.end() && found->second.kind == entry.kind &&
           found->second.n == entry.n && found->second.k == entry.k &&
           found->second.precision == entry.precision;
  });
  std::erase_if(layout.targets, [&](const auto& named) {
    return layout.entries.find(named.second.entry) == layout.entries.end();
  });
  layout.bytes = 0;
  for (auto& [name, entry] : layout.entries) {
    entry.offset = layout.bytes;
    layout.bytes += aligned_bytes(entry.bytes);
  }
  return layout;
}

std::int64_t weight_bytes(const ModelConfig& config, Precision precision) {
  return weight_layout(config, precision).bytes;
}

std::vector<TensorSpec> tensors_of(const ModelConfig& config) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, target] : weight_layout(config, Precision::f32).targets) {
    specs.push_back({name, target.shape});
  }
  return specs;
}

}  // namespace specrt
