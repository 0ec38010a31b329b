#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "specrt/export.h"
#include "specrt/types.h"

namespace specrt {

enum class Activation : std::uint8_t { silu = 0, gelu_tanh = 1 };

/// Where RMSNorms stand in a layer.
enum class NormPlacement : std::uint8_t {
  pre = 0,       ///< before attention and MLP (Llama)
  post = 1,      ///< behind them, before the residual is added (OLMo 2)
  sandwich = 2,  ///< both (Gemma 2 and 3)
};

/// RMSNorm of queries and keys before they are rotated.
enum class QkNorm : std::uint8_t {
  none = 0,
  head = 1,   ///< each head by itself, weight [head_dim] (Qwen3, Gemma 3)
  whole = 2,  ///< all heads together, weight [heads * head_dim] (OLMo 2)
};

/// What a draft head makes of the target's hidden states and the token behind them.
enum class HeadKind : std::uint8_t {
  none = 0,    ///< a model of its own: layers read the token's embedding
  fused = 1,   ///< layers read fc(cat[embedding, hidden]) (EAGLE, MTP)
  beside = 2,  ///< fc makes one hidden state of several, which is the residual stream; the first
               ///< layer's attention reads it beside the embedding, both normed (EAGLE-3)
};

/// A draft head: some layers of a decoder over the target's hidden states. Behind the first drafted
/// token its own last hidden state stands for the target's.
struct SPECRT_API HeadConfig {
  HeadKind kind = HeadKind::none;
  std::int64_t input_vocab = 0;    ///< of the embedding; vocab_size is that of the output head
  std::int64_t feature_parts = 1;  ///< hidden states of the target that it reads at a position
  std::int64_t feature_size = 0;   ///< of each of them
  bool fc = true;                  ///< false (beside only): the hidden state is taken as it is
  bool fc_bias = false;
  bool hidden_first = false;          ///< fused: cat[hidden, embedding]
  bool embedding_norm = false;        ///< fused: the embedding normed before fc
  bool hidden_norm = false;           ///< fused: the hidden state normed before fc
  bool zero_first = false;            ///< fused: the embedding at position 0 counts as zeros
  bool first_norm = true;             ///< fused: whether layer 0 has an attention_norm
  bool input_norm = false;            ///< beside: all parts together normed before fc
  bool part_norms = false;            ///< beside: each part normed before fc
  bool norm_before_residual = false;  ///< beside: the residual stream starts from the normed state
  bool final_norm = true;             ///< before the output head
  bool norm_output = false;           ///< the state that is fed back went through the final norm
  bool own_embedding = true;          ///< false: the target's
  bool own_lm_head = true;            ///< false: the target's

  bool operator==(const HeadConfig&) const = default;
};

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
  double attention_scale = 0.0;  ///< 0: 1 / sqrt(head_dim)
  /// Rotary factors, any scaling applied: one value a rotated pair, at most head_dim / 2; fewer
  /// rotate only the first 2 * size dimensions of a head.
  std::vector<float> rope_inv_freq;
  std::vector<float> rope_local_inv_freq;  ///< for layers with a window; empty: the same
  double rope_scale = 1.0;                 ///< multiplies cos and sin (of rope_inv_freq only)
  std::vector<std::int64_t> windows;       ///< by layer, 0: all positions; empty: no windows
  Activation activation = Activation::silu;
  NormPlacement norm_placement = NormPlacement::pre;
  QkNorm qk_norm = QkNorm::none;
  double attention_softcap = 0.0;  ///< 0: none
  double final_softcap = 0.0;      ///< of the logits; 0: none
  double embedding_scale = 1.0;
  double residual_scale = 1.0;  ///< multiplies what each block adds to the residual
  double logits_scale = 1.0;
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool tied_embeddings = false;
  std::vector<TokenId> eos_token_ids;  ///< for callers: the core stops only where it is told to
  HeadConfig head;

  /// Throws InvalidArgument naming the first field that does not fit the others.
  void check() const;
  std::int64_t window_of(std::int64_t layer) const {
    return windows.empty() ? 0 : windows[static_cast<std::size_t>(layer)];
  }
};

/// One tensor that a model of a given config has to be given, by canonical name.
struct SPECRT_API TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// The canonical tensors, by name:
///   embedding [vocab, hidden], layers.{i}.attention_norm and .attention_post_norm [hidden] (as
///   norm_placement has them), layers.{i}.attention.{q,k,v,o} [out, in] (and .bias where the
///   config has them), layers.{i}.attention.{q,k}_norm (as qk_norm has them),
///   layers.{i}.mlp_norm and .mlp_post_norm [hidden], layers.{i}.mlp.{gate,up,down} (and .bias),
///   norm [hidden], lm_head [vocab, hidden] (absent where embeddings are tied).
/// Of a draft head also fc [hidden, inputs] (and .bias), embedding_norm and hidden_norm [hidden],
///   input_norm [parts * size] or part_norms.{p} [size] as its config has them. With `beside`,
///   layers.0.attention.{q,k,v} have twice the inputs, and layers.0.attention_norm is the
///   embedding's.
SPECRT_API std::vector<TensorSpec> tensors_of(const ModelConfig& config);

/// Bytes of packed weights: exactly what ModelBuilder allocates.
SPECRT_API std::int64_t weight_bytes(const ModelConfig& config, Precision precision);

/// A matrix that is quantised already, [n, k]. Groups are of 32 inputs.
struct QuantisedTensor {
  Precision precision = Precision::int8;
  const std::int8_t* codes = nullptr;  ///< [n, k]: int8 and w8a8 -128 to 127, int4 0 to 15
  const float* scales = nullptr;       ///< int8, w8a8: [n]; int4: [n, groups], fp16 values
  const float* minima = nullptr;       ///< int4: [n, groups], fp16 values
  bool zero_points = false;  ///< int4: minima count scales, the weight is scale * (q + minimum)
};

struct ModelData;
struct TensorTarget;

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
  Precision precision() const;
  std::int64_t weight_bytes() const;
  const ModelData& data() const { return *data_; }
  std::shared_ptr<const ModelData> shared_data() const { return data_; }

 private:
  std::shared_ptr<const ModelData> data_;
};

/// Takes a model's tensors one at a time, packing each as it comes.
class SPECRT_API ModelBuilder {
 public:
  ModelBuilder(const ModelConfig& config, Precision precision);
  ~ModelBuilder();
  ModelBuilder(ModelBuilder&&) noexcept;
  ModelBuilder& operator=(ModelBuilder&&) noexcept;

  /// `data` is row-major; matrices are quantised where the precision asks for it, on all cores.
  /// int4 rounds best when tensors come as a forward pass reads them (embedding; by layer the norms
  /// of a block before its matrices; q, k, v, o, gate, up, down): what came before tells how large
  /// a matrix's inputs are. Throws InvalidArgument for an unknown or repeated name, a wrong shape,
  /// or weights that the precision cannot hold.
  void set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
           const void* data);

  /// How a tensor is stored: f32 for vectors. Matrices have the model's precision, but output
  /// heads are int8 where the other matrices are int4 or w8a8. Throws InvalidArgument.
  Precision precision_of(const std::string& name) const;

  /// A matrix as it is, without rounding. Throws as set() does, and where the tensor's precision is
  /// not precision_of(name) or a code or scale is none of it.
  void set_quantised(const std::string& name, std::span<const std::int64_t> shape,
                     const QuantisedTensor& tensor);

  /// Throws LoadError naming every tensor that is still missing. Leaves the builder empty.
  Model build();

 private:
  const TensorTarget& target_of(const std::string& name) const;
  const TensorTarget& claim(const std::string& name, std::span<const std::int64_t> shape);

  std::unique_ptr<ModelData> data_;
};

/// A model that drafts for `target` with the target's own weights (self-speculation, as in Zhang et
/// al. 2309.08168): its first `layers` layers under its norm and head, matrices in `precision`.
/// What the target holds in that form already is shared, not copied; the rest is rounded from what
/// it holds. Throws InvalidArgument where that is the target itself, or finer than it.
SPECRT_API Model make_self_draft(const Model& target, Precision precision, std::int64_t layers);

/// The config of that model. Throws as make_self_draft() does.
SPECRT_API ModelConfig self_draft_config(const ModelConfig& config, Precision target,
                                         Precision precision, std::int64_t layers);

/// Bytes of weights that it adds to the target's.
SPECRT_API std::int64_t self_draft_bytes(const ModelConfig& config, Precision target,
                                         Precision precision, std::int64_t layers);

}  // namespace specrt
