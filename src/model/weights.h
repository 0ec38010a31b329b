#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "model/buffer.h"
#include "model/input_moments.h"
#include "specrt/model.h"

namespace specrt {

/// Where one piece of a model lies in the arena.
struct WeightEntry {
  enum class Kind : std::uint8_t {
    packed,  ///< [n, k] in the layout of cpu/kernels.h
    rows,    ///< [n, k] row-major, f32 or bf16
    vector,  ///< [n] fp32
  };
  Kind kind = Kind::packed;
  std::int64_t n = 0;
  std::int64_t k = 1;
  Precision precision = Precision::f32;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// A canonical tensor's place in an entry. Fused matrices take several.
struct TensorTarget {
  std::string entry;
  cpu::PackedRows rows;
  std::vector<std::int64_t> shape;
};

/// The arena's layout follows from config and precision alone, so a saved file needs no index.
struct WeightLayout {
  std::map<std::string, WeightEntry> entries;
  std::map<std::string, TensorTarget> targets;
  std::int64_t bytes = 0;
};

/// The widest matrix input of a draft head beside those that every model has.
std::int64_t head_inputs(const ModelConfig& config);
WeightLayout weight_layout(const ModelConfig& config, Precision precision);
/// Throws InvalidArgument for a type that no builder reads.
void check_given(const std::string& name, DType dtype);

/// The part of a layout that `other` lacks: entries of which it has none of the same kind, shape
/// and precision. Offsets and bytes are those of an arena for them alone.
WeightLayout layout_beside(WeightLayout layout, const WeightLayout& other);

struct Matrix {
  const void* data = nullptr;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Precision precision = Precision::f32;
};

/// The part of a product's arguments that follows from what is multiplied: x is [rows, matrix.k],
/// `prepared` what Kernels::prepare made of it.
inline cpu::GemmArgs product_of(const Matrix& matrix, const float* x, std::int64_t rows,
                                const void* prepared) {
  cpu::GemmArgs args;
  args.x = x;
  args.rows = rows;
  args.x_stride = matrix.k;
  args.weight = matrix.data;
  args.n = matrix.n;
  args.k = matrix.k;
  args.prepared = prepared;
  return args;
}

struct LayerWeights {
  const float* attention_norm = nullptr;  ///< null where norms stand behind the blocks only
  const float* attention_post_norm = nullptr;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  Matrix qkv;  ///< rows: q heads, k heads, v heads
  const float* qkv_bias = nullptr;
  Matrix output;
  const float* output_bias = nullptr;
  const float* mlp_norm = nullptr;
  const float* mlp_post_norm = nullptr;
  Matrix gate_up;  ///< panels of gate and up in turn; n counts the gate's outputs
  const float* gate_up_bias = nullptr;  ///< in the same order
  Matrix down;
  const float* down_bias = nullptr;
};

class CudaWeights;

/// A model's weights on devices, while somebody uses them: see CudaWeights::of().
struct DeviceCopies {
  std::mutex mutex;
  std::map<int, std::weak_ptr<const CudaWeights>> by_device;
};

struct ModelData {
  ModelConfig config;
  Precision precision = Precision::f32;
  WeightLayout layout;
  Buffer buffer;
  std::shared_ptr<const ModelData> shared;  ///< whose arena has what `layout` lacks; mostly null
  std::int64_t arena_offset = 0;      ///< of the arena in the buffer (a mapped file has a header)
  std::map<std::string, bool> given;  ///< while building: which tensors have come
  std::unique_ptr<InputMoments> moments;  ///< while building int4, else null
  mutable DeviceCopies on_devices;

  const void* embedding = nullptr;  ///< row-major, of activation_dtype(precision); null where the
                                    ///< head doubles as the embedding
  Matrix head;
  const float* norm = nullptr;
  std::vector<LayerWeights> layers;

  // Of draft heads.
  Matrix fc;
  const float* fc_bias = nullptr;
  const float* embedding_norm = nullptr;
  const float* hidden_norm = nullptr;
  const float* input_norm = nullptr;
  std::vector<const float*> part_norms;

  std::byte* arena() { return buffer.data() + arena_offset; }
  const std::byte* arena() const { return buffer.data() + arena_offset; }
  /// An entry, here or in `shared`, and where it lies; null where there is none.
  const WeightEntry* find_entry(const std::string& name, const std::byte** at) const;
  /// Bytes of weights that a pass through the first `layers` layers and the head reads.
  std::int64_t bytes_read(std::int64_t layers) const;
  /// Points the fields above into the arena.
  void resolve();
};

/// Header text of a saved model and back; model_file.cpp.
std::string config_to_text(const ModelConfig& config, Precision precision);
void config_from_text(const std::string& text, const std::string& path, ModelConfig& config,
                      Precision& precision);

}  // namespace specrt
