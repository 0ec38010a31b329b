#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/buffer.h"
#include "specrt/model.h"

namespace specrt {

/// Where one piece of a model lies in the arena.
struct WeightEntry {
  enum class Kind : std::uint8_t {
    packed,  ///< [n, k] in the layout of cpu/kernels.h, of the model's dtype
    rows,    ///< [n, k] row-major, of the model's dtype
    vector,  ///< [n] fp32
  };
  Kind kind = Kind::packed;
  std::int64_t n = 0;
  std::int64_t k = 1;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

/// A canonical tensor's place: rows [row, row + n) of an entry. Fused matrices take several.
struct TensorTarget {
  std::string entry;
  std::int64_t row = 0;
  std::vector<std::int64_t> shape;
};

/// The arena's layout follows from config and dtype alone, so a saved file needs no index.
struct WeightLayout {
  std::map<std::string, WeightEntry> entries;
  std::map<std::string, TensorTarget> targets;
  std::int64_t bytes = 0;
};

WeightLayout weight_layout(const ModelConfig& config, DType dtype);

struct Matrix {
  const void* data = nullptr;
  std::int64_t n = 0;
  std::int64_t k = 0;
};

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
  Matrix gate_up;  ///< rows: gate, up
  const float* gate_up_bias = nullptr;
  Matrix down;
  const float* down_bias = nullptr;
};

struct ModelData {
  ModelConfig config;
  DType dtype = DType::f32;
  WeightLayout layout;
  Buffer buffer;
  std::int64_t arena_offset = 0;      ///< of the arena in the buffer (a mapped file has a header)
  std::map<std::string, bool> given;  ///< while building: which tensors have come

  const void* embedding = nullptr;  ///< row-major; null where the head doubles as the embedding
  Matrix head;
  const float* norm = nullptr;
  std::vector<LayerWeights> layers;

  std::byte* arena() { return buffer.data() + arena_offset; }
  const std::byte* arena() const { return buffer.data() + arena_offset; }
  /// Points the fields above into the arena.
  void resolve();
};

/// Header text of a saved model and back; model_file.cpp.
std::string config_to_text(const ModelConfig& config, DType dtype);
void config_from_text(const std::string& text, const std::string& path, ModelConfig& config,
                      DType& dtype);

}  // namespace specrt
