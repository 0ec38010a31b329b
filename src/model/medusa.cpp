#include "model/medusa.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/pack.h"
#include "cpu/thread_team.h"
#include "model/cuda_runner.h"
#include "model/parallel_rows.h"
#include "specrt/error.h"

namespace specrt {
namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// A projection's mistakes cost more than a block's, as an output head's do.
Precision precision_of(const TensorSpec& tensor, Precision precision) {
  if (tensor.shape.size() == 1) return Precision::f32;
  const bool projects = tensor.name.find("projection") != std::string::npos;
  const bool coarse = precision == Precision::int4 || precision == Precision::w8a8;
  return projects && coarse ? Precision::int8 : precision;
}

std::map<std::string, WeightEntry> layout_of(const MedusaConfig& config, Precision precision,
                                             std::int64_t& bytes) {
  config.check();
  std::map<std::string, WeightEntry> entries;
  bytes = 0;
  for (const TensorSpec& tensor : tensors_of(config)) {
    WeightEntry entry;
    entry.precision = precision_of(tensor, precision);
    entry.n = tensor.shape[0];
    entry.offset = bytes;
    if (tensor.shape.size() == 1) {
      entry.kind = WeightEntry::Kind::vector;
      entry.bytes = entry.n * 4;
    } else {
      entry.k = tensor.shape[1];
      entry.bytes = cpu::packed_bytes(entry.n, entry.k, entry.precision);
    }
    bytes += aligned(entry.bytes);
    entries.emplace(tensor.name, entry);
  }
  return entries;
}

}  // namespace

std::string medusa_block(const MedusaConfig& config, std::int64_t head, std::int64_t block) {
  return "heads." + std::to_string(head) + ".blocks." +
         std::to_string(config.shared_blocks ? 0 : block);
}

std::string medusa_projection(const MedusaConfig& config, std::int64_t head) {
  return config.shared_projection ? "projection" : "heads." + std::to_string(head) + ".projection";
}

std::map<std::string, WeightEntry> medusa_entries(const MedusaConfig& config, Precision precision) {
  std::int64_t bytes = 0;
  return layout_of(config, precision, bytes);
}

void MedusaConfig::check() const {
  const auto positive = [](const char* what, std::int64_t value) {
    if (value < 1) throw InvalidArgument(expected_got(what, "at least 1", std::to_string(value)));
  };
  positive("vocab_size", vocab_size);
  positive("hidden_size", hidden_size);
  positive("medusa heads", num_heads);
  if (num_blocks < 0 || num_blocks > 1024) {
    throw InvalidArgument(expected_got("blocks", "from 0 to 1024", std::to_string(num_blocks)));
  }
  if (outputs < 1 || outputs > vocab_size) {
    throw InvalidArgument(expected_got(
        "outputs", "from 1 to the target's vocabulary of " + std::to_string(vocab_size),
        std::to_string(outputs)));
  }
  if (!std::isfinite(logits_scale) || logits_scale <= 0.0) {
    throw InvalidArgument(
        expected_got("logits_scale", "a positive number", std::to_string(logits_scale)));
  }
  if (token_map.empty()) return;
  if (std::ssize(token_map) != outputs) {
    throw InvalidArgument(expected_got("token_map", std::to_string(outputs) + " tokens",
                                       std::to_string(token_map.size())));
  }
  std::vector<bool> seen(static_cast<std::size_t>(vocab_size));
  for (const TokenId token : token_map) {
    if (token < 0 || token >= vocab_size || seen[static_cast<std::size_t>(token)]) {
      throw InvalidArgument(
          expected_got("token_map", "different tokens in [0, " + std::to_string(vocab_size) + ")",
                       std::to_string(token)));
    }
    seen[static_cast<std::size_t>(token)] = true;
  }
}

std::vector<TensorSpec> tensors_of(const MedusaConfig& c) {
  std::vector<TensorSpec> specs;
  const std::int64_t blocks =
      c.shared_blocks ? std::min<std::int64_t>(c.num_blocks, 1) : c.num_blocks;
  for (std::int64_t head = 0; head < c.num_heads; ++head) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::string name = medusa_block(c, head, block);
      specs.push_back({name, {c.hidden_size, c.hidden_size}});
      if (c.bias) specs.push_back({name + ".bias", {c.hidden_size}});
    }
    if (head == 0 || !c.shared_projection) {
      specs.push_back({medusa_projection(c, head), {c.outputs, c.hidden_size}});
    }
  }
  return specs;
}

std::int64_t weight_bytes(const MedusaConfig& config, Precision precision) {
  std::int64_t bytes = 0;
  layout_of(config, precision, bytes);
  return bytes;
}

const WeightEntry* MedusaData::find_entry(const std::string& name, const std::byte** at) const {
  const auto found = entries.find(name);
  if (found == entries.end()) return nullptr;
  *at = buffer.data() + found->second.offset;
  return &found->second;
}

Matrix MedusaData::matrix(const std::string& name) const {
  const WeightEntry& entry = entries.at(name);
  return {buffer.data() + entry.offset, entry.n, entry.k, entry.precision};
}

const float* MedusaData::vector(const std::string& name) const {
  const auto found = entries.find(name);
  if (found == entries.end()) return nullptr;
  return reinterpret_cast<const float*>(buffer.data() + found->second.offset);
}

MedusaHeads::MedusaHeads(std::shared_ptr<const MedusaData> data) : data_(std::move(data)) {}
const MedusaConfig& MedusaHeads::config() const { return data_->config; }
Precision MedusaHeads::precision() const { return data_->precision; }
std::int64_t MedusaHeads::weight_bytes() const { return data_->bytes; }

MedusaBuilder::MedusaBuilder(const MedusaConfig& config, Precision precision)
    : data_(std::make_unique<MedusaData>()) {
  data_->config = config;
  data_->precision = precision;
  data_->entries = layout_of(config, precision, data_->bytes);
  data_->buffer = Buffer::allocate(data_->bytes, "medusa heads");
}

MedusaBuilder::~MedusaBuilder() = default;
MedusaBuilder::MedusaBuilder(MedusaBuilder&&) noexcept = default;
MedusaBuilder& MedusaBuilder::operator=(MedusaBuilder&&) noexcept = default;

void MedusaBuilder::set(const std::string& name, std::span<const std::int64_t> shape, DType dtype,
                        const void* data) {
  if (data_ == nullptr) {
    throw InvalidArgument("[medusa builder] expected an open builder, got a used one");
  }
  check_given(name, dtype);
  const auto found = data_->entries.find(name);
  if (found == data_->entries.end()) {
    throw InvalidArgument(expected_got("tensor", "a canonical name of this config", name));
  }
  const WeightEntry& entry = found->second;
  const bool matrix = entry.kind == WeightEntry::Kind::packed;
  const bool fits = matrix ? shape.size() == 2 && shape[0] == entry.n && shape[1] == entry.k
                           : shape.size() == 1 && shape[0] == entry.n;
  if (!fits) {
    const std::string rows = std::to_string(entry.n);
    std::string got;
    for (const std::int64_t one : shape) got += (got.empty() ? "" : ", ") + std::to_string(one);
    throw InvalidArgument(
        expected_got(name, "shape [" + rows + (matrix ? ", " + std::to_string(entry.k) : "") + "]",
                     "[" + got + "]"));
  }
  if (data_->given[name]) throw InvalidArgument(expected_got(name, "one tensor", "a second one"));
  std::byte* base = data_->buffer.data() + entry.offset;
  if (!matrix) {
    for (std::int64_t i = 0; i < entry.n; ++i) {
      float value = 0.0f;
      if (dtype == DType::f32) {
        std::memcpy(&value, static_cast<const float*>(data) + i, 4);
      } else {
        std::uint16_t half;
        std::memcpy(&half, static_cast<const std::uint16_t*>(data) + i, 2);
        value = cpu::bf16_to_float(half);
      }
      std::memcpy(base + i * 4, &value, 4);
    }
  } else {
    try {
      parallel_rows(entry.n, entry.n * entry.k, [&](std::int64_t begin, std::int64_t end) {
        cpu::PackedRows rows;
        rows.first = begin;
        const auto* from = static_cast<const std::byte*>(data) +
                           begin * entry.k * static_cast<std::int64_t>(size_of(dtype));
        cpu::pack_rows(from, dtype, end - begin, entry.k, entry.precision, rows, base);
      });
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(name + ": " + error.what());
    }
  }
  data_->given[name] = true;
}

MedusaHeads MedusaBuilder::build() {
  if (data_ == nullptr) {
    throw InvalidArgument("[medusa builder] expected an open builder, got a used one");
  }
  std::string missing;
  for (const auto& [name, entry] : data_->entries) {
    if (!data_->given[name]) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) {
    throw LoadError(
        expected_got("medusa heads", "every tensor of the config", "none for " + missing));
  }
  return MedusaHeads(std::shared_ptr<const MedusaData>(std::move(data_)));
}

MedusaRunner::MedusaRunner(const MedusaHeads& heads, std::int64_t max_rows,
                           const std::shared_ptr<ThreadTeam>& team, const std::string& cpu_isa,
                           const std::string& device, std::span<const std::int32_t> counts)
    : heads_(heads),
      max_rows_(max_rows),
      team_(team != nullptr ? team : std::make_shared<ThreadTeam>()),
      pool_(&team_->impl().pool),
      kernels_(&cpu::kernels_of(cpu_isa_from_name(cpu_isa))) {
  check_dtype(heads.precision(), device);
  if (const std::optional<int> on = cuda_device_of(device)) {
    cuda_ = std::make_unique<CudaMedusa>(heads, max_rows, counts, *on);
    return;
  }
  buffer_ = Buffer::allocate(workspace_bytes(heads.config(), max_rows, device), "medusa workspace");
  const MedusaConfig& c = heads_.config();
  const MedusaData& data = heads_.data();
  for (std::int64_t head = 0; head < c.num_heads; ++head) {
    Head part;
    for (std::int64_t block = 0; block < c.num_blocks; ++block) {
      const std::string name = medusa_block(c, head, block);
      part.blocks.push_back({data.matrix(name), data.vector(name + ".bias")});
    }
    part.projection = data.matrix(medusa_projection(c, head));
    parts_.push_back(std::move(part));
  }
  std::byte* at = buffer_.data();
  const auto take = [&](std::int64_t bytes) {
    float* const here = reinterpret_cast<float*>(at);
    at += aligned(bytes);
    return here;
  };
  const std::int64_t rows = max_rows * c.hidden_size * 4;
  input_ = take(rows);
  x_ = take(rows);
  read_ = take(rows);
  block_ = take(rows);
  prepared_ = take(cpu::prepared_bytes(max_rows, c.hidden_size));
  logits_ = take(max_rows * c.outputs * 4);
}

std::int64_t MedusaRunner::workspace_bytes(const MedusaConfig& c, std::int64_t max_rows,
                                           const std::string& device) {
  if (cuda_device_of(device)) return CudaMedusa::workspace_bytes(c, max_rows);
  return 4 * aligned(max_rows * c.hidden_size * 4) +
         aligned(cpu::prepared_bytes(max_rows, c.hidden_size)) + aligned(max_rows * c.outputs * 4);
}

void MedusaRunner::copy_features(const FeatureRows& from, std::int64_t i, float* to) {
  if (cuda_ != nullptr) {
    cuda_->copies().check(from);
    cuda_->copies().add_features(from, i, to, cuda_->stream());
  } else {
    from.copy(i, to);
  }
}

void MedusaRunner::settle_states() {
  if (cuda_ != nullptr) cuda_->copies().flush(cuda_->stream());
}

void MedusaRunner::start(std::span<const float* const> states) {
  if (cuda_ != nullptr) {
    cuda_->start(states);
    return;
  }
  const std::int64_t hidden = heads_.config().hidden_size;
  float* to = input_;
  for (const float* from : states) to = std::copy(from, from + hidden, to);
}

void MedusaRunner::read(const float* x, std::int64_t rows) {
  const std::int64_t count = rows * heads_.config().hidden_size;
  if (heads_.precision() == Precision::f32) {
    std::copy(x, x + count, read_);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    read_[i] = cpu::bf16_to_float(cpu::float_to_bf16(x[i]));
  }
}

void MedusaRunner::product(const Matrix& matrix, const float* bias, std::int64_t rows, float* y,
                           std::int64_t y_stride) {
  const cpu::Prepare prepare = kernels_->prepare[static_cast<int>(matrix.precision)];
  if (prepare != nullptr) {
    prepare(read_, rows, matrix.k, matrix.k, 0, cpu::prepared_rows(rows), prepared_);
  }
  cpu::GemmArgs args = product_of(matrix, read_, rows, prepared_);
  args.bias = bias;
  args.y = y;
  args.y_stride = y_stride;
  const cpu::Gemm body = kernels_->gemm[static_cast<int>(matrix.precision)];
  pool_->parallel_balanced(
      (matrix.n + cpu::kPanel - 1) / cpu::kPanel, 2,
      [&](int, std::int64_t begin, std::int64_t end) { body(args, begin, end); });
}

std::span<const float> MedusaRunner::logits(std::int64_t head, std::int64_t rows) {
  if (cuda_ != nullptr) return cuda_->logits(head, rows);
  const MedusaConfig& c = heads_.config();
  const Head& part = parts_[static_cast<std::size_t>(head)];
  const std::int64_t count = rows * c.hidden_size;
  std::copy(input_, input_ + count, x_);
  for (const Block& block : part.blocks) {
    read(x_, rows);
    product(block.matrix, block.bias, rows, block_, c.hidden_size);
    for (std::int64_t i = 0; i < count; ++i) {
      x_[i] += block_[i] / (1.0f + std::exp(-block_[i]));
    }
  }
  read(x_, rows);
  product(part.projection, nullptr, rows, logits_, c.outputs);
  if (c.logits_scale != 1.0) {
    kernels_->scale(logits_, rows * c.outputs, static_cast<float>(c.logits_scale));
  }
  return {logits_, static_cast<std::size_t>(rows * c.outputs)};
}

std::vector<float> medusa_logits(const MedusaHeads& heads, std::span<const float> hidden,
                                 const std::shared_ptr<ThreadTeam>& team,
                                 const std::string& cpu_isa) {
  if (!heads.valid()) throw InvalidArgument("[medusa] expected loaded heads, got none");
  const MedusaConfig& c = heads.config();
  const std::int64_t rows = std::ssize(hidden) / c.hidden_size;
  if (rows < 1 || rows * c.hidden_size != std::ssize(hidden)) {
    throw InvalidArgument(
        expected_got("hidden", "[rows, " + std::to_string(c.hidden_size) + "], at least one row",
                     std::to_string(hidden.size()) + " values"));
  }
  const cpu::FpMode mode;
  MedusaRunner runner(heads, rows, team, cpu_isa);
  std::vector<const float*> states;
  for (std::int64_t row = 0; row < rows; ++row) {
    states.push_back(hidden.data() + row * c.hidden_size);
  }
  runner.start(states);
  std::vector<float> out;
  for (std::int64_t head = 0; head < c.num_heads; ++head) {
    const std::span<const float> logits = runner.logits(head, rows);
    out.insert(out.end(), logits.begin(), logits.end());
  }
  return out;
}

}  // namespace specrt
