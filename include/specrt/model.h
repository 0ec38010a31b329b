#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

/// Everything that decides a decoder-only transformer's arithmetic. A family (Llama, Qwen2, ...)
/// is a way to fill this in; the core knows no families.
struct SPECRT_API ModelConfig {
  std::string family;  ///< for messages only
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position_embeddings = 0;
  double norm_eps = 1e-5;
  double attention_scale = 0.0;          ///< 0: 1 / sqrt(head_dim)
  std::vector<float> rope_inv_freq;      ///< head_dim / 2 values, scaling already applied
  double rope_scale = 1.0;               ///< multiplies cos and sin
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool tied_embeddings = false;
  std::vector<TokenId> eos_token_ids;    ///< for callers: the core stops only where it is told to

  /// Throws InvalidArgument naming the first field that does not fit the others.
  void check() const;
};

/// One tensor that a model of a given config has to be given, by canonical name.
struct SPECRT_API TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// The canonical tensors, in order:
///   embedding [vocab, hidden], layers.{i}.attention_norm [hidden],
///   layers.{i}.attention.{q,k,v,o} [out, in] (and .bias where the config has them),
///   layers.{i}.mlp_norm [hidden], layers.{i}.mlp.{gate,up,down} (and .bias), norm [hidden],
///   lm_head [vocab, hidden] (absent where embeddings are tied).
SPECRT_API std::vector<TensorSpec> tensors_of(const ModelConfig& config);

/// Bytes of packed weights: exactly what ModelBuilder allocates.
SPECRT_API std::int64_t weight_bytes(const ModelConfig& config, DType dtype);

struct ModelData;

/// Packed, immutable weights with their config. Copies share the weights.
class SPECRT_API Model {
 public:
  Model() = default;
  explicit Model(std::shared_ptr<const ModelData> data);

  /// Maps a file written by save(). Nothing is copied; pages load when touched.
  static Model map(const std::string& path);

  /// Writes config and packed weights; the file appears whole or not at all.
  void save(const std::string& path) const;

  bool valid() const { return data_ != nullptr; }
  const ModelConfig& config() const;
  DType dtype() const;
  std::int64_t weight_bytes() const;
  const ModelData& data() const { return *data_; }

 private:
  std::shared_ptr<const ModelData> data_;
};

/// Takes a model's tensors one at a time, packing each as it comes.
class SPECRT_API ModelBuilder {
 public:
  ModelBuilder(const ModelConfig& config, DType dtype);
  ~ModelBuilder();
  ModelBuilder(ModelBuilder&&) noexcept;
  ModelBuilder& operator=(ModelBuilder&&) noexcept;

  /// `data` is row-major. Throws InvalidArgument for an unknown or repeated name or a wrong shape.
  void set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
           const void* data);

  /// Throws LoadError naming every tensor that is still missing. Leaves the builder empty.
  Model build();

 private:
  std::unique_ptr<ModelData> data_;
};

}  // namespace specrt
