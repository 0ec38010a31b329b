#include "specrt/model.h"

#include <cstring>

#include "cpu/pack.h"
#include "model/weights.h"
#include "specrt/error.h"

namespace specrt {

void ModelData::resolve() {
  const std::byte* base = arena();
  const auto matrix = [&](const std::string& name) {
    const WeightEntry& entry = layout.entries.at(name);
    return Matrix{base + entry.offset, entry.n, entry.k};
  };
  const auto vector = [&](const std::string& name) -> const float* {
    const auto found = layout.entries.find(name);
    if (found == layout.entries.end()) return nullptr;
    return reinterpret_cast<const float*>(base + found->second.offset);
  };
  embedding = config.tied_embeddings ? nullptr : base + layout.entries.at("embedding").offset;
  head = matrix("lm_head");
  norm = vector("norm");
  layers.clear();
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    LayerWeights weights;
    weights.attention_norm = vector(layer + "attention_norm");
    weights.qkv = matrix(layer + "attention.qkv");
    weights.qkv_bias = vector(layer + "attention.qkv.bias");
    weights.output = matrix(layer + "attention.o");
    weights.output_bias = vector(layer + "attention.o.bias");
    weights.mlp_norm = vector(layer + "mlp_norm");
    weights.mlp_post_norm = vector(layer + "mlp_post_norm");
    weights.attention_post_norm = vector(layer + "attention_post_norm");
    weights.q_norm = vector(layer + "attention.q_norm");
    weights.k_norm = vector(layer + "attention.k_norm");
    weights.gate_up = matrix(layer + "mlp.gate_up");
    weights.gate_up_bias = vector(layer + "mlp.gate_up.bias");
    weights.down = matrix(layer + "mlp.down");
    weights.down_bias = vector(layer + "mlp.down.bias");
    layers.push_back(weights);
  }
}

Model::Model(std::shared_ptr<const ModelData> data) : data_(std::move(data)) {}

const ModelConfig& Model::config() const { return data_->config; }
DType Model::dtype() const { return data_->dtype; }
std::int64_t Model::weight_bytes() const { return data_->layout.bytes; }

ModelBuilder::ModelBuilder(const ModelConfig& config, DType dtype)
    : data_(std::make_unique<ModelData>()) {
  data_->config = config;
  data_->dtype = dtype;
  data_->layout = weight_layout(config, dtype);
  data_->buffer = Buffer::allocate(data_->layout.bytes, "model weights");
}

ModelBuilder::~ModelBuilder() = default;
ModelBuilder::ModelBuilder(ModelBuilder&&) noexcept = default;
ModelBuilder& ModelBuilder::operator=(ModelBuilder&&) noexcept = default;

namespace {

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Row-major copy with conversion; `n` elements.
void convert(const void* source, DType from, std::int64_t n, DType to, std::byte* out) {
  if (from == to) {
    std::memcpy(out, source, static_cast<std::size_t>(n) * size_of(to));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    if (to == DType::bf16) {
      const std::uint16_t value = cpu::float_to_bf16(static_cast<const float*>(source)[i]);
      std::memcpy(out + i * 2, &value, 2);
    } else {
      const float value = cpu::bf16_to_float(static_cast<const std::uint16_t*>(source)[i]);
      std::memcpy(out + i * 4, &value, 4);
    }
  }
}

}  // namespace

void ModelBuilder::set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
                       const void* data) {
  if (data_ == nullptr)
    throw InvalidArgument("[model builder] expected an open builder, got a used one");
  const auto found = data_->layout.targets.find(name);
  if (found == data_->layout.targets.end()) {
    throw InvalidArgument(expected_got("tensor", "a canonical name of this config", name));
  }
  const TensorTarget& target = found->second;
  if (!std::equal(shape.begin(), shape.end(), target.shape.begin(), target.shape.end())) {
    throw InvalidArgument(
        expected_got(name, "shape " + shape_text(target.shape), shape_text(shape)));
  }
  if (data_->given[name]) throw InvalidArgument(expected_got(name, "one tensor", "a second one"));
  const WeightEntry& entry = data_->layout.entries.at(target.entry);
  std::byte* base = data_->arena() + entry.offset;
  const std::int64_t n = target.shape[0];
  switch (entry.kind) {
    case WeightEntry::Kind::packed:
      cpu::pack_rows(data, dtype, n, entry.k, data_->dtype, target.row, base);
      break;
    case WeightEntry::Kind::rows:
      convert(data, dtype, n * entry.k, data_->dtype, base);
      break;
    case WeightEntry::Kind::vector:
      convert(data, dtype, n, DType::f32, base + target.row * 4);
      break;
  }
  data_->given[name] = true;
}

Model ModelBuilder::build() {
  if (data_ == nullptr)
    throw InvalidArgument("[model builder] expected an open builder, got a used one");
  std::string missing;
  for (const auto& [name, target] : data_->layout.targets) {
    const auto given = data_->given.find(name);
    if (given == data_->given.end() || !given->second)
      missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) {
    throw LoadError(expected_got("model", "every tensor of the config", "none for " + missing));
  }
  data_->given.clear();
  data_->resolve();
  return Model(std::shared_ptr<const ModelData>(std::move(data_)));
}

}  // namespace specrt
