#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/pack.h"
#include "model/parallel_rows.h"
#include "model/weights.h"
#include "specrt/error.h"

// A target's own weights as its draft model's: fewer layers, coarser matrices, or both.

namespace specrt {
namespace {

/// How finely a precision says what the target says; equal ones differ in speed alone.
int fineness(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return 4;
    case Precision::bf16:
    case Precision::f16:
      return 3;
    case Precision::int8:
      return 2;
    case Precision::w8a8:
      return 1;
    case Precision::int4:
      return 0;
  }
  return 0;
}

/// A layer's tensors in the order in which a forward pass reads them: what rounding to int4 goes
/// by.
constexpr std::array kLayerTensors = {
    "attention_norm",   "attention.q",         "attention.q.bias", "attention.k",
    "attention.k.bias", "attention.v",         "attention.v.bias", "attention.q_norm",
    "attention.k_norm", "attention_post_norm", "attention.o",      "attention.o.bias",
    "mlp_norm",         "mlp_post_norm",       "mlp.gate",         "mlp.gate.bias",
    "mlp.up",           "mlp.up.bias",         "mlp.down",         "mlp.down.bias"};

std::vector<std::string> in_order(const WeightLayout& layout, std::int64_t layers) {
  std::vector<std::string> names = {"embedding"};
  for (std::int64_t i = 0; i < layers; ++i) {
    for (const char* tensor : kLayerTensors) {
      std::string name = "layers." + std::to_string(i) + "." + tensor;
      if (layout.targets.count(name) != 0) names.push_back(std::move(name));
    }
  }
  names.emplace_back("norm");
  if (layout.targets.count("lm_head") != 0) names.emplace_back("lm_head");
  return names;
}

/// Reads row r of one of a model's tensors as floats.
class TensorReader {
 public:
  TensorReader(const ModelData& data, const WeightLayout& whole, const std::string& name)
      : target_(whole.targets.at(name)), entry_(data.find_entry(target_.entry, &at_)) {
    if (entry_ == nullptr) throw InternalError("[self draft] expected " + name + ", got none");
  }
  std::int64_t rows() const { return target_.shape[0]; }
  std::int64_t width() const { return entry_->kind == WeightEntry::Kind::vector ? 1 : entry_->k; }
  void read(std::int64_t r, float* out) const {
    switch (entry_->kind) {
      case WeightEntry::Kind::packed:
        cpu::unpack_row(at_, entry_->precision, entry_->k, target_.rows.row(r), out);
        return;
      case WeightEntry::Kind::rows: {
        const auto size = static_cast<std::int64_t>(size_of(activation_dtype(entry_->precision)));
        const std::byte* row = at_ + r * entry_->k * size;
        for (std::int64_t c = 0; c < entry_->k; ++c) {
          if (size == 4) {
            std::memcpy(out + c, row + c * 4, 4);
          } else {
            std::uint16_t half;
            std::memcpy(&half, row + c * 2, 2);
            out[c] = entry_->precision == Precision::f16 ? cpu::half_to_float(half)
                                                         : cpu::bf16_to_float(half);
          }
        }
        return;
      }
      case WeightEntry::Kind::vector:
        std::memcpy(out, at_ + target_.rows.row(r) * 4, 4);
        return;
    }
  }

 private:
  const TensorTarget& target_;
  const std::byte* at_ = nullptr;
  const WeightEntry* entry_ = nullptr;
};

/// Fills an entry's part that a tensor takes, some rows at a time.
void store(const TensorReader& from, const TensorTarget& target, const WeightEntry& entry,
           std::byte* base, const std::vector<float>& importance) {
  const std::int64_t width = from.width();
  parallel_rows(from.rows(), from.rows() * width, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> block(static_cast<std::size_t>(cpu::kPanel * width));
    for (std::int64_t first = begin; first < end; first += cpu::kPanel) {
      const std::int64_t last = std::min(end, first + cpu::kPanel);
      for (std::int64_t r = first; r < last; ++r) from.read(r, block.data() + (r - first) * width);
      switch (entry.kind) {
        case WeightEntry::Kind::packed: {
          cpu::PackedRows rows = target.rows;
          rows.first += first;
          cpu::pack_rows(block.data(), DType::f32, last - first, entry.k, entry.precision, rows,
                         base, importance);
          break;
        }
        case WeightEntry::Kind::rows:  // in bf16, which the target has not, or it would be shared
          for (std::int64_t i = 0; i < (last - first) * width; ++i) {
            const std::uint16_t half = cpu::float_to_bf16(block[static_cast<std::size_t>(i)]);
            std::memcpy(base + (first * width + i) * 2, &half, 2);
          }
          break;
        case WeightEntry::Kind::vector:
          for (std::int64_t r = first; r < last; ++r) {
            std::memcpy(base + target.rows.row(r) * 4, &block[static_cast<std::size_t>(r - first)],
                        4);
          }
          break;
      }
    }
  });
}

WeightLayout own_layout(const ModelConfig& config, Precision target, Precision precision,
                        const ModelConfig& draft) {
  return layout_beside(weight_layout(draft, precision), weight_layout(config, target));
}

}  // namespace

ModelConfig self_draft_config(const ModelConfig& config, Precision target, Precision precision,
                              std::int64_t layers) {
  if (layers < 1 || layers > config.num_layers) {
    throw InvalidArgument(
        expected_got("layers", "from 1 to the target's " + std::to_string(config.num_layers),
                     std::to_string(layers)));
  }
  if (fineness(precision) > fineness(target)) {
    throw InvalidArgument(
        expected_got("precision", std::string("one coarser than the target's ") + name_of(target),
                     name_of(precision)));
  }
  if (precision == target && layers == config.num_layers) {
    throw InvalidArgument(expected_got("self draft",
                                       std::string("fewer layers than the target's ") +
                                           std::to_string(config.num_layers) +
                                           " or a coarser precision than " + name_of(target),
                                       "the target itself"));
  }
  ModelConfig draft = config;
  draft.num_layers = layers;
  if (!draft.windows.empty()) draft.windows.resize(static_cast<std::size_t>(layers));
  return draft;
}

std::int64_t self_draft_bytes(const ModelConfig& config, Precision target, Precision precision,
                              std::int64_t layers) {
  const ModelConfig draft = self_draft_config(config, target, precision, layers);
  return own_layout(config, target, precision, draft).bytes;
}

Model make_self_draft(const Model& target, Precision precision, std::int64_t layers) {
  if (!target.valid())
    throw InvalidArgument("[self draft] expected a loaded model, got an empty one");
  const ModelData& from = target.data();
  if (from.config.head.kind != HeadKind::none) {
    throw InvalidArgument("[self draft] expected a whole model, got a draft head");
  }
  auto data = std::make_shared<ModelData>();
  data->config = self_draft_config(from.config, from.precision, precision, layers);
  data->precision = precision;
  data->layout = own_layout(from.config, from.precision, precision, data->config);
  data->shared = target.shared_data();
  if (data->layout.bytes > 0) {
    data->buffer = Buffer::allocate(data->layout.bytes, "self-drafting weights");
    const WeightLayout whole = weight_layout(from.config, from.precision);
    // Everything is looked at, in order, so that int4 knows how large inputs are; what is not
    // shared is stored.
    const WeightLayout wanted = weight_layout(data->config, precision);
    InputMoments moments(data->config);
    const bool weigh = precision == Precision::int4;
    for (const std::string& name : in_order(wanted, layers)) {
      const TensorReader reader(from, whole, name);
      const auto read = [&](std::int64_t r, float* out) { reader.read(r, out); };
      const auto found = data->layout.targets.find(name);
      if (found != data->layout.targets.end()) {
        const WeightEntry& entry = data->layout.entries.at(found->second.entry);
        std::vector<float> importance;
        if (weigh) importance = moments.inputs_of(name);
        try {
          store(reader, found->second, entry, data->arena() + entry.offset, importance);
        } catch (const InvalidArgument& error) {
          throw InvalidArgument(name + ": " + error.what());
        }
      }
      if (weigh) moments.observe(name, reader.rows(), reader.width(), read);
    }
  }
  data->resolve();
  return Model(std::move(data));
}

}  // namespace specrt
