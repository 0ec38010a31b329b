#include "specrt/model.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "specrt/error.h"

namespace specrt::python {

void bind_model(py::module_& module) {
  py::class_<ModelConfig>(module, "ModelConfig",
                          "Everything that decides a decoder-only transformer's arithmetic.")
      .def(py::init([](std::string family, std::int64_t vocab_size, std::int64_t hidden_size,
                       std::int64_t intermediate_size, std::int64_t num_layers,
                       std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                       std::int64_t max_position_embeddings, double norm_eps,
                       double attention_scale, std::vector<float> rope_inv_freq, double rope_scale,
                       bool qkv_bias, bool output_bias, bool mlp_bias, bool tied_embeddings,
                       std::vector<TokenId> eos_token_ids) {
             ModelConfig c;
             c.family = std::move(family);
             c.vocab_size = vocab_size;
             c.hidden_size = hidden_size;
             c.intermediate_size = intermediate_size;
             c.num_layers = num_layers;
             c.num_heads = num_heads;
             c.num_kv_heads = num_kv_heads;
             c.head_dim = head_dim;
             c.max_position_embeddings = max_position_embeddings;
             c.norm_eps = norm_eps;
             c.attention_scale = attention_scale;
             c.rope_inv_freq = std::move(rope_inv_freq);
             c.rope_scale = rope_scale;
             c.qkv_bias = qkv_bias;
             c.output_bias = output_bias;
             c.mlp_bias = mlp_bias;
             c.tied_embeddings = tied_embeddings;
             c.eos_token_ids = std::move(eos_token_ids);
             c.check();
             return c;
           }),
           py::kw_only(), py::arg("family"), py::arg("vocab_size"), py::arg("hidden_size"),
           py::arg("intermediate_size"), py::arg("num_layers"), py::arg("num_heads"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("max_position_embeddings"),
           py::arg("norm_eps"), py::arg("attention_scale"), py::arg("rope_inv_freq"),
           py::arg("rope_scale"), py::arg("qkv_bias"), py::arg("output_bias"), py::arg("mlp_bias"),
           py::arg("tied_embeddings"), py::arg("eos_token_ids") = std::vector<TokenId>{})
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
      py::arg("config"), "(canonical name, shape) of every tensor that a model of this config has.");
  module.def(
      "weight_bytes",
      [](const ModelConfig& config, const std::string& dtype) {
        return weight_bytes(config, dtype_from_name(dtype));
      },
      py::arg("config"), py::arg("dtype"), "Bytes of the packed weights.");

  py::class_<Model>(module, "Model", "Packed, immutable weights with their config.")
      .def_static("map", &Model::map, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
                  "Maps a file written by save().")
      .def("save", &Model::save, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
           "Writes config and packed weights; the file appears whole or not at all.")
      .def_property_readonly("config", &Model::config, py::return_value_policy::copy)
      .def_property_readonly("dtype", [](const Model& model) { return std::string(name_of(model.dtype())); })
      .def_property_readonly("weight_bytes", &Model::weight_bytes);

  py::class_<ModelBuilder>(module, "ModelBuilder", "Takes a model's tensors one at a time.")
      .def(py::init([](const ModelConfig& config, const std::string& dtype) {
             return ModelBuilder(config, dtype_from_name(dtype));
           }),
           py::arg("config"), py::arg("dtype"))
      .def(
          "set",
          [](ModelBuilder& builder, const std::string& name, const std::string& dtype,
             const py::array& array) {
            const DType type = dtype_from_name(dtype);
            const bool fits = type == DType::f32 ? py::isinstance<py::array_t<float>>(array)
                                                 : py::isinstance<py::array_t<std::uint16_t>>(array);
            if (!fits || !(array.flags() & py::array::c_style)) {
              throw InvalidArgument(expected_got(
                  name, std::string("a C-contiguous array of ") +
                            (type == DType::f32 ? "float32" : "uint16 holding bfloat16"),
                  py::str(array.dtype()).cast<std::string>()));
            }
            const std::vector<std::int64_t> shape(array.shape(), array.shape() + array.ndim());
            const void* data = array.data();
            const py::gil_scoped_release released;
            builder.set(name, shape, type, data);
          },
          py::arg("name"), py::arg("dtype"), py::arg("array"),
          "Packs one canonical tensor: float32, or uint16 with the bits of bfloat16.")
      .def("build", &ModelBuilder::build, "Raises LoadError naming every tensor still missing.");
}

}  // namespace specrt::python
