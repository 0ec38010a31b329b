#pragma once

// The forward pass of a tiny Llama by its definition, in double precision.

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "cpu/pack.h"
#include "reference/kernels.h"
#include "tiny_decode.h"
#include "tiny_model.h"

namespace tiny {

using specrt::Precision;
using specrt::reference::Vector;

/// No cache, no batch: layer by layer over the whole text. Activations are not rounded; the
/// tolerance for bf16 covers that.
class Oracle {
 public:
  Oracle(const tiny::Spec& spec, const tiny::Tensors& tensors) : config_(tiny::config_of(spec)) {
    for (const specrt::TensorSpec& tensor : specrt::tensors_of(config_)) {
      const std::vector<float>& values = tensors.at(tensor.name);
      Vector& out = tensors_[tensor.name];
      if (tensor.shape.size() < 2) {
        out.assign(values.begin(), values.end());
        continue;
      }
      // Matrices stand for what packing makes of them.
      const Precision precision = stored_as(spec.dtype, tensor.name);
      const std::int64_t n = tensor.shape[0];
      const std::int64_t k = tensor.shape[1];
      std::vector<std::byte> packed(
          static_cast<std::size_t>(specrt::cpu::packed_bytes(n, k, precision)));
      specrt::cpu::pack_rows(values.data(), specrt::DType::f32, n, k, precision, {}, packed.data());
      std::vector<float> row(static_cast<std::size_t>(k));
      for (std::int64_t r = 0; r < n; ++r) {
        specrt::cpu::unpack_row(packed.data(), precision, k, r, row.data());
        out.insert(out.end(), row.begin(), row.end());
      }
    }
  }

  Precision stored_as(Precision precision, const std::string& name) const {
    if (name == "embedding" && !config_.tied_embeddings) {
      const bool own = precision == Precision::f32 || precision == Precision::f16;
      return own ? precision : Precision::bf16;
    }
    const bool coarse = precision == Precision::int4 || precision == Precision::w8a8;
    return coarse && (name == "lm_head" || name == "embedding") ? Precision::int8 : precision;
  }

  std::vector<Vector> logits(const tiny::Tokens& text) const {
    const std::int64_t hidden = config_.hidden_size;
    const auto n = static_cast<std::int64_t>(text.size());
    std::vector<Vector> x;
    for (const TokenId token : text) {
      const auto row = tensors_.at("embedding").begin() + token * hidden;
      x.emplace_back(row, row + hidden);
    }
    for (std::int64_t i = 0; i < config_.num_layers; ++i) layer(i, x);
    std::vector<Vector> out;
    for (std::int64_t r = 0; r < n; ++r) {
      const Vector normed = specrt::reference::rms_norm(x[static_cast<std::size_t>(r)],
                                                        tensors_.at("norm"), config_.norm_eps);
      out.push_back(specrt::reference::gemm(
          normed, tensors_.at(config_.tied_embeddings ? "embedding" : "lm_head"), {}, 1,
          config_.vocab_size, hidden));
    }
    return out;
  }

 private:
  Vector linear(const std::string& name, const Vector& x) const {
    const Vector& weight = tensors_.at(name);
    const auto bias = tensors_.find(name + ".bias");
    const auto k = static_cast<std::int64_t>(x.size());
    return specrt::reference::gemm(x, weight, bias == tensors_.end() ? Vector() : bias->second, 1,
                                   static_cast<std::int64_t>(weight.size()) / k, k);
  }

  Vector rotated(const Vector& head, std::size_t position) const {
    Vector angles;
    for (const float factor : config_.rope_inv_freq) {
      angles.push_back(static_cast<double>(factor) * static_cast<double>(position));
    }
    Vector out = specrt::reference::rope(head, angles);
    for (double& value : out) value *= config_.rope_scale;
    return out;
  }

  static Vector part(const Vector& x, std::int64_t index, std::int64_t size) {
    return {x.begin() + index * size, x.begin() + (index + 1) * size};
  }

  void layer(std::int64_t index, std::vector<Vector>& x) const {
    const std::string name = "layers." + std::to_string(index) + ".";
    const std::int64_t dim = config_.head_dim;
    const double scale = config_.attention_scale > 0 ? config_.attention_scale
                                                     : 1.0 / std::sqrt(static_cast<double>(dim));
    const auto kv_heads = static_cast<std::size_t>(config_.num_kv_heads);
    std::vector<std::vector<Vector>> keys(kv_heads);
    std::vector<std::vector<Vector>> values(kv_heads);
    for (std::size_t r = 0; r < x.size(); ++r) {
      const Vector normed =
          specrt::reference::rms_norm(x[r], tensors_.at(name + "attention_norm"), config_.norm_eps);
      const Vector q = linear(name + "attention.q", normed);
      const Vector k = linear(name + "attention.k", normed);
      const Vector v = linear(name + "attention.v", normed);
      for (std::size_t h = 0; h < kv_heads; ++h) {
        keys[h].push_back(rotated(part(k, static_cast<std::int64_t>(h), dim), r));
        values[h].push_back(part(v, static_cast<std::int64_t>(h), dim));
      }
      Vector attended;
      for (std::int64_t h = 0; h < config_.num_heads; ++h) {
        const auto kv = static_cast<std::size_t>(h * config_.num_kv_heads / config_.num_heads);
        const Vector out =
            specrt::reference::attention(rotated(part(q, h, dim), r), keys[kv], values[kv], scale);
        attended.insert(attended.end(), out.begin(), out.end());
      }
      add(x[r], linear(name + "attention.o", attended));
    }
    for (Vector& row : x) {
      const Vector normed =
          specrt::reference::rms_norm(row, tensors_.at(name + "mlp_norm"), config_.norm_eps);
      add(row,
          linear(name + "mlp.down", specrt::reference::silu_mul(linear(name + "mlp.gate", normed),
                                                                linear(name + "mlp.up", normed))));
    }
  }

  static void add(Vector& x, const Vector& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  specrt::ModelConfig config_;
  std::map<std::string, Vector> tensors_;
};

}  // namespace tiny
