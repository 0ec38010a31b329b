#include "specrt/model.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "specrt/error.h"
#include "tensors.h"

namespace specrt::python {
namespace {

using CodeArray = py::array_t<std::int8_t, py::array::c_style>;
using FloatArray = py::array_t<float, py::array::c_style>;

/// Keyword arguments by name: one place lists the fields, and an unknown name is an error.
class Fields {
 public:
  explicit Fields(const py::kwargs& fields) : fields_(fields) {}
  template <typename T>
  void read(const char* name, T& value) {
    known_ += 1;
    if (!fields_.contains(name)) {
      known_ -= 1;
      return;
    }
    value = fields_[name].template cast<T>();
  }
  template <typename E>
  void read_choice(const char* name, std::initializer_list<const char*> names, E& value) {
    std::string text;
    read(name, text);
    if (text.empty()) return;
    int index = 0;
    for (const char* one : names) {
      if (text == one) {
        value = static_cast<E>(index);
        return;
      }
      ++index;
    }
    throw InvalidArgument(expected_got(name, "one of the core's names", text));
  }
  void check_all_known() const {
    if (known_ != fields_.size()) {
      throw InvalidArgument("[model config] expected only fields of ModelConfig, got others");
    }
  }

 private:
  const py::kwargs& fields_;
  std::size_t known_ = 0;
};

void read_fields(const py::kwargs& given, ModelConfig& c) {
  Fields fields(given);
  fields.read("family", c.family);
  fields.read("vocab_size", c.vocab_size);
  fields.read("hidden_size", c.hidden_size);
  fields.read("intermediate_size", c.intermediate_size);
  fields.read("num_layers", c.num_layers);
  fields.read("num_heads", c.num_heads);
  fields.read("num_kv_heads", c.num_kv_heads);
  fields.read("head_dim", c.head_dim);
  fields.read("max_position_embeddings", c.max_position_embeddings);
  fields.read("norm_eps", c.norm_eps);
  fields.read("attention_scale", c.attention_scale);
  fields.read("rope_inv_freq", c.rope_inv_freq);
  fields.read("rope_local_inv_freq", c.rope_local_inv_freq);
  fields.read("rope_scale", c.rope_scale);
  fields.read("windows", c.windows);
  fields.read_choice("activation", {"silu", "gelu_tanh"}, c.activation);
  fields.read_choice("norm_placement", {"pre", "post", "sandwich"}, c.norm_placement);
  fields.read_choice("qk_norm", {"none", "head", "whole"}, c.qk_norm);
  fields.read("attention_softcap", c.attention_softcap);
  fields.read("final_softcap", c.final_softcap);
  fields.read("embedding_scale", c.embedding_scale);
  fields.read("residual_scale", c.residual_scale);
  fields.read("logits_scale", c.logits_scale);
  fields.read("qkv_bias", c.qkv_bias);
  fields.read("output_bias", c.output_bias);
  fields.read("mlp_bias", c.mlp_bias);
  fields.read("tied_embeddings", c.tied_embeddings);
  fields.read("eos_token_ids", c.eos_token_ids);
  HeadConfig& head = c.head;
  fields.read_choice("head_kind", {"none", "fused", "beside"}, head.kind);
  fields.read("head_input_vocab", head.input_vocab);
  fields.read("head_feature_parts", head.feature_parts);
  fields.read("head_feature_size", head.feature_size);
  fields.read("head_fc", head.fc);
  fields.read("head_fc_bias", head.fc_bias);
  fields.read("head_hidden_first", head.hidden_first);
  fields.read("head_embedding_norm", head.embedding_norm);
  fields.read("head_hidden_norm", head.hidden_norm);
  fields.read("head_zero_first", head.zero_first);
  fields.read("head_first_norm", head.first_norm);
  fields.read("head_input_norm", head.input_norm);
  fields.read("head_part_norms", head.part_norms);
  fields.read("head_norm_before_residual", head.norm_before_residual);
  fields.read("head_final_norm", head.final_norm);
  fields.read("head_norm_output", head.norm_output);
  fields.read("head_own_embedding", head.own_embedding);
  fields.read("head_own_lm_head", head.own_lm_head);
  fields.check_all_known();
}

}  // namespace

void bind_model(py::module_& module) {
  py::class_<ModelConfig>(module, "ModelConfig",
                          "Everything that decides a decoder-only transformer's arithmetic.")
      .def(py::init([](const py::KWArgs<py::object>& fields) {
             ModelConfig c;
             read_fields(fields, c);
             c.check();
             return c;
           }),
           "Fields as keywords: see specrt.loading.ModelFields. Raises InvalidArgumentError.")
      .def_readonly("family", &ModelConfig::family)
      .def_readonly("vocab_size", &ModelConfig::vocab_size)
      .def_readonly("hidden_size", &ModelConfig::hidden_size)
      .def_readonly("num_layers", &ModelConfig::num_layers)
      .def_readonly("max_position_embeddings", &ModelConfig::max_position_embeddings)
      .def_readonly("eos_token_ids", &ModelConfig::eos_token_ids);

  module.def(
      "tensors_of",
      [](const ModelConfig& config) {
        std::vector<std::pair<std::string, std::vector<std::int64_t>>> out;
        for (TensorSpec& spec : tensors_of(config)) {
          out.emplace_back(std::move(spec.name), std::move(spec.shape));
        }
        return out;
      },
      py::arg("config"),
      "(canonical name, shape) of every tensor that a model of this config has.");
  module.def(
      "weight_bytes",
      [](const ModelConfig& config, const std::string& dtype) {
        return weight_bytes(config, precision_from_name(dtype));
      },
      py::arg("config"), py::arg("dtype"), "Bytes of the packed weights.");

  module.def(
      "self_draft_config",
      [](const ModelConfig& config, const std::string& target, const std::string& precision,
         std::int64_t layers) {
        return self_draft_config(config, precision_from_name(target),
                                 precision_from_name(precision), layers);
      },
      py::arg("config"), py::arg("target"), py::arg("precision"), py::arg("layers"),
      "Of the model that make_self_draft() makes of a target of that config and dtype.");
  module.def(
      "self_draft_bytes",
      [](const ModelConfig& config, const std::string& target, const std::string& precision,
         std::int64_t layers) {
        return self_draft_bytes(config, precision_from_name(target), precision_from_name(precision),
                                layers);
      },
      py::arg("config"), py::arg("target"), py::arg("precision"), py::arg("layers"),
      "Bytes of weights that it does not share with the target.");

  py::class_<Model>(module, "Model", "Packed, immutable weights with their config.")
      .def_static("map", &Model::map, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
                  "Maps a file written by save().")
      .def("save", &Model::save, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
           "Writes config and packed weights; the file appears whole or not at all.")
      .def_property_readonly("config", &Model::config, py::return_value_policy::copy)
      .def_property_readonly(
          "dtype", [](const Model& model) { return std::string(name_of(model.precision())); })
      .def_property_readonly("weight_bytes", &Model::weight_bytes);

  module.def(
      "make_self_draft",
      [](const Model& target, const std::string& precision, std::int64_t layers) {
        return make_self_draft(target, precision_from_name(precision), layers);
      },
      py::arg("target"), py::arg("precision"), py::arg("layers"),
      py::call_guard<py::gil_scoped_release>(),
      "The target's first layers in that dtype, sharing what the target holds so already.");

  py::class_<ModelBuilder>(module, "ModelBuilder", "Takes a model's tensors one at a time.")
      .def(py::init([](const ModelConfig& config, const std::string& dtype) {
             return ModelBuilder(config, precision_from_name(dtype));
           }),
           py::arg("config"), py::arg("dtype"))
      .def("set", &set_tensor<ModelBuilder>, py::arg("name"), py::arg("dtype"), py::arg("array"),
           "Packs one canonical tensor: float32, or uint16 with the bits of bfloat16.")
      .def(
          "precision_of",
          [](const ModelBuilder& builder, const std::string& name) {
            return std::string(name_of(builder.precision_of(name)));
          },
          py::arg("name"), "How a tensor is stored: a dtype's name, float32 for vectors.")
      .def(
          "set_quantised",
          [](ModelBuilder& builder, const std::string& name, const std::string& precision,
             const CodeArray& codes, const FloatArray& scales,
             const std::optional<FloatArray>& minima, bool zero_points) {
            QuantisedTensor tensor;
            tensor.precision = precision_from_name(precision);
            const bool int4 = tensor.precision == Precision::int4;
            if (codes.ndim() != 2 || int4 != minima.has_value()) {
              throw InvalidArgument(expected_got(
                  name, "codes [outputs, inputs], and minima exactly for int4", "others"));
            }
            const std::vector<std::int64_t> shape(codes.shape(), codes.shape() + 2);
            const std::int64_t count = int4 ? shape[0] * ((shape[1] + 31) / 32) : shape[0];
            if (scales.size() != count || (int4 && minima->size() != count)) {
              throw InvalidArgument(expected_got(name,
                                                 std::to_string(count) + " scales (and minima)",
                                                 std::to_string(scales.size())));
            }
            tensor.codes = codes.data();
            tensor.scales = scales.data();
            tensor.minima = int4 ? minima->data() : nullptr;
            tensor.zero_points = zero_points;
            const py::gil_scoped_release released;
            builder.set_quantised(name, shape, tensor);
          },
          py::arg("name"), py::arg("precision"), py::arg("codes"), py::arg("scales"),
          py::arg("minima") = py::none(), py::arg("zero_points") = false,
          "Takes a matrix that is quantised already, without rounding.\n\n"
          "codes: int8 [outputs, inputs], -128 to 127 for int8 and w8a8, 0 to 15 for int4. "
          "scales:\n"
          "float32 [outputs], for int4 [outputs, ceil(inputs / 32)], as minima are; both values "
          "of\n"
          "float16. With zero_points the weight is scale * (code + minimum), else\n"
          "scale * code + minimum. `precision` has to be precision_of(name).")
      .def("build", &ModelBuilder::build, "Raises LoadError naming every tensor still missing.");
}

}  // namespace specrt::python
