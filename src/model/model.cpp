#include "specrt/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "cpu/quantise.h"
#include "model/input_moments.h"
#include "model/parallel_rows.h"
#include "model/weights.h"
#include "specrt/error.h"

namespace specrt {

const WeightEntry* ModelData::find_entry(const std::string& name, const std::byte** at) const {
  const auto found = layout.entries.find(name);
  if (found == layout.entries.end()) {
    return shared == nullptr ? nullptr : shared->find_entry(name, at);
  }
  *at = arena() + found->second.offset;
  return &found->second;
}

std::int64_t ModelData::bytes_read(std::int64_t count) const {
  const auto bytes = [](const Matrix& matrix) {
    return matrix.data == nullptr ? 0 : cpu::packed_bytes(matrix.n, matrix.k, matrix.precision);
  };
  std::int64_t sum = bytes(head) + bytes(fc);
  for (std::int64_t i = 0; i < count; ++i) {
    const LayerWeights& layer = layers[static_cast<std::size_t>(i)];
    // Gate and up lie in turn; n counts one of them.
    sum += bytes(layer.qkv) + bytes(layer.output) + 2 * bytes(layer.gate_up) + bytes(layer.down);
  }
  return sum;
}

void ModelData::resolve() {
  const auto matrix = [&](const std::string& name) {
    const std::byte* at = nullptr;
    const WeightEntry* entry = find_entry(name, &at);
    if (entry == nullptr) throw InternalError("[model] expected the matrix " + name + ", got none");
    return Matrix{at, entry->n, entry->k, entry->precision};
  };
  const auto vector = [&](const std::string& name) -> const float* {
    const std::byte* at = nullptr;
    return find_entry(name, &at) == nullptr ? nullptr : reinterpret_cast<const float*>(at);
  };
  const bool drafts = config.head.kind != HeadKind::none;
  const bool table = drafts ? config.head.own_embedding : !config.tied_embeddings;
  embedding = table ? matrix("embedding").data : nullptr;
  head = drafts && !config.head.own_lm_head ? Matrix{} : matrix("lm_head");
  if (layout.entries.count("fc") != 0) fc = matrix("fc");
  fc_bias = vector("fc.bias");
  embedding_norm = vector("embedding_norm");
  hidden_norm = vector("hidden_norm");
  input_norm = vector("input_norm");
  part_norms.clear();
  for (std::int64_t p = 0; config.head.part_norms && p < config.head.feature_parts; ++p) {
    part_norms.push_back(vector("part_norms." + std::to_string(p)));
  }
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
    weights.gate_up.n = config.intermediate_size;
    weights.gate_up_bias = vector(layer + "mlp.gate_up.bias");
    weights.down = matrix(layer + "mlp.down");
    weights.down_bias = vector(layer + "mlp.down.bias");
    layers.push_back(weights);
  }
}

Model::Model(std::shared_ptr<const ModelData> data) : data_(std::move(data)) {}

const ModelConfig& Model::config() const { return data_->config; }
Precision Model::precision() const { return data_->precision; }
std::int64_t Model::weight_bytes() const { return data_->layout.bytes; }

ModelBuilder::ModelBuilder(const ModelConfig& config, Precision precision)
    : data_(std::make_unique<ModelData>()) {
  data_->config = config;
  data_->precision = precision;
  data_->layout = weight_layout(config, precision);
  data_->buffer = Buffer::allocate(data_->layout.bytes, "model weights");
  // Only int4's rounding is coarse enough to gain by it.
  if (precision == Precision::int4 && config.head.kind == HeadKind::none)
    data_->moments = std::make_unique<InputMoments>(config);
}

ModelBuilder::~ModelBuilder() = default;
ModelBuilder::ModelBuilder(ModelBuilder&&) noexcept = default;
ModelBuilder& ModelBuilder::operator=(ModelBuilder&&) noexcept = default;

void check_given(const std::string& name, DType dtype) {
  if (dtype == DType::f16) {
    throw InvalidArgument(
        expected_got(name, "float32 or bfloat16, which float16 widens to", "float16"));
  }
}

namespace {

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

// Copies one value with conversion.
void convert(const void* source, DType from, std::int64_t at, DType to, std::byte* out) {
  const auto* halves = static_cast<const std::uint16_t*>(source);
  const float value =
      from == DType::f32 ? static_cast<const float*>(source)[at] : cpu::bf16_to_float(halves[at]);
  if (to == DType::f32) {
    std::memcpy(out, &value, 4);
  } else if (to == DType::f16) {
    const std::uint16_t half = cpu::weight_to_half(value);
    std::memcpy(out, &half, 2);
  } else {
    const std::uint16_t half = from == DType::f32 ? cpu::float_to_bf16(value) : halves[at];
    std::memcpy(out, &half, 2);
  }
}

std::int64_t width_of(const WeightEntry& entry) {
  return entry.kind == WeightEntry::Kind::vector ? 1 : entry.k;
}

bool within(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

bool half_exact(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) {
    return cpu::half_to_float(cpu::float_to_half(value)) == value;
  });
}

}  // namespace

const TensorTarget& ModelBuilder::target_of(const std::string& name) const {
  if (data_ == nullptr)
    throw InvalidArgument("[model builder] expected an open builder, got a used one");
  const auto found = data_->layout.targets.find(name);
  if (found == data_->layout.targets.end()) {
    throw InvalidArgument(expected_got("tensor", "a canonical name of this config", name));
  }
  return found->second;
}

const TensorTarget& ModelBuilder::claim(const std::string& name,
                                        std::span<const std::int64_t> shape) {
  const TensorTarget& target = target_of(name);
  if (!std::equal(shape.begin(), shape.end(), target.shape.begin(), target.shape.end())) {
    throw InvalidArgument(
        expected_got(name, "shape " + shape_text(target.shape), shape_text(shape)));
  }
  if (data_->given[name]) throw InvalidArgument(expected_got(name, "one tensor", "a second one"));
  return target;
}

Precision ModelBuilder::precision_of(const std::string& name) const {
  const TensorTarget& target = target_of(name);
  return data_->layout.entries.at(target.entry).precision;
}

void ModelBuilder::set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
                       const void* data) {
  check_given(name, dtype);
  const TensorTarget& target = claim(name, shape);
  const WeightEntry& entry = data_->layout.entries.at(target.entry);
  std::byte* base = data_->arena() + entry.offset;
  const std::int64_t n = target.shape[0];
  const DType stored = activation_dtype(entry.precision);
  const auto read_row = [&](std::int64_t r, float* out) {
    const std::int64_t width = width_of(entry);
    for (std::int64_t c = 0; c < width; ++c) {
      convert(data, dtype, r * width + c, DType::f32, reinterpret_cast<std::byte*>(out + c));
    }
  };
  std::vector<float> importance;
  if (data_->moments != nullptr) importance = data_->moments->inputs_of(name);
  switch (entry.kind) {
    case WeightEntry::Kind::packed:
      try {
        parallel_rows(n, n * entry.k, [&](std::int64_t begin, std::int64_t end) {
          cpu::PackedRows rows = target.rows;
          rows.first += begin;
          const auto* from = static_cast<const std::byte*>(data) +
                             begin * entry.k * static_cast<std::int64_t>(size_of(dtype));
          cpu::pack_rows(from, dtype, end - begin, entry.k, entry.precision, rows, base,
                         importance);
        });
      } catch (const InvalidArgument& error) {
        throw InvalidArgument(name + ": " + error.what());
      }
      break;
    case WeightEntry::Kind::rows:
      if (dtype == stored) {
        std::memcpy(base, data, static_cast<std::size_t>(n * entry.k) * size_of(stored));
        break;
      }
      for (std::int64_t i = 0; i < n * entry.k; ++i) {
        convert(data, dtype, i, stored, base + i * static_cast<std::int64_t>(size_of(stored)));
      }
      break;
    case WeightEntry::Kind::vector:
      for (std::int64_t i = 0; i < n; ++i) {
        convert(data, dtype, i, DType::f32, base + target.rows.row(i) * 4);
      }
      break;
  }
  if (data_->moments != nullptr) data_->moments->observe(name, n, width_of(entry), read_row);
  data_->given[name] = true;
}

void ModelBuilder::set_quantised(const std::string& name, std::span<const std::int64_t> shape,
                                 const QuantisedTensor& tensor) {
  const TensorTarget& target = claim(name, shape);
  const WeightEntry& entry = data_->layout.entries.at(target.entry);
  if (entry.kind != WeightEntry::Kind::packed || entry.precision != tensor.precision ||
      tensor.precision == Precision::f32 || tensor.precision == Precision::bf16 ||
      tensor.precision == Precision::f16) {
    throw InvalidArgument(expected_got(name, std::string("a tensor of ") + name_of(entry.precision),
                                       name_of(tensor.precision)));
  }
  const std::int64_t n = target.shape[0];
  const bool int4 = tensor.precision == Precision::int4;
  const std::int64_t groups = int4 ? cpu::packed::steps_of(entry.k) : 1;
  const std::int8_t lowest = int4 ? 0 : -128;
  const std::int8_t highest = int4 ? 15 : 127;
  if (!std::all_of(tensor.codes, tensor.codes + n * entry.k,
                   [&](std::int8_t code) { return code >= lowest && code <= highest; })) {
    throw InvalidArgument(expected_got(
        name, "codes from " + std::to_string(lowest) + " to " + std::to_string(highest), "others"));
  }
  if (!within(tensor.scales, n * groups) || (int4 && !within(tensor.minima, n * groups))) {
    throw InvalidArgument(expected_got(name, "finite scales", "others"));
  }
  if (int4 && !(half_exact(tensor.scales, n * groups) && half_exact(tensor.minima, n * groups))) {
    throw InvalidArgument(expected_got(name, "scales and minima that fp16 can hold", "others"));
  }
  std::byte* base = data_->arena() + entry.offset;
  parallel_rows(n, n * entry.k, [&](std::int64_t begin, std::int64_t end) {
    cpu::PackedRows rows = target.rows;
    rows.first += begin;
    QuantisedTensor share = tensor;
    share.codes += begin * entry.k;
    share.scales += begin * groups;
    if (int4) share.minima += begin * groups;
    cpu::pack_codes(share, end - begin, entry.k, rows, base);
  });
  if (data_->moments != nullptr) {
    // What is stored by now says it all, whatever the precision.
    data_->moments->observe(name, n, entry.k, [&](std::int64_t r, float* out) {
      cpu::unpack_row(base, entry.precision, entry.k, target.rows.row(r), out);
    });
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
  data_->moments.reset();
  data_->resolve();
  return Model(std::shared_ptr<const ModelData>(std::move(data_)));
}

}  // namespace specrt
