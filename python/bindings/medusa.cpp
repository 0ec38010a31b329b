#include "specrt/medusa.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "specrt/error.h"
#include "tensors.h"

namespace specrt::python {

void bind_medusa(py::module_& module) {
  py::class_<MedusaConfig>(module, "MedusaConfig", "What decides Medusa heads' arithmetic.")
      .def(
          py::init([](std::int64_t vocab_size, std::int64_t hidden_size, std::int64_t num_heads,
                      std::int64_t num_blocks, std::int64_t outputs, bool bias, bool shared_blocks,
                      bool shared_projection, double logits_scale, std::vector<TokenId> token_map) {
            MedusaConfig config;
            config.vocab_size = vocab_size;
            config.hidden_size = hidden_size;
            config.num_heads = num_heads;
            config.num_blocks = num_blocks;
            config.outputs = outputs;
            config.bias = bias;
            config.shared_blocks = shared_blocks;
            config.shared_projection = shared_projection;
            config.logits_scale = logits_scale;
            config.token_map = std::move(token_map);
            config.check();
            return config;
          }),
          py::kw_only(), py::arg("vocab_size"), py::arg("hidden_size"), py::arg("num_heads"),
          py::arg("num_blocks"), py::arg("outputs"), py::arg("bias"), py::arg("shared_blocks"),
          py::arg("shared_projection"), py::arg("logits_scale"), py::arg("token_map"))
      .def_readonly("num_heads", &MedusaConfig::num_heads)
      .def_readonly("num_blocks", &MedusaConfig::num_blocks)
      .def_readonly("outputs", &MedusaConfig::outputs)
      .def_readonly("bias", &MedusaConfig::bias)
      .def_readonly("shared_blocks", &MedusaConfig::shared_blocks)
      .def_readonly("shared_projection", &MedusaConfig::shared_projection)
      .def_readonly("token_map", &MedusaConfig::token_map);
  module.def(
      "medusa_tensors",
      [](const MedusaConfig& config) {
        std::vector<std::pair<std::string, std::vector<std::int64_t>>> out;
        for (TensorSpec& spec : tensors_of(config)) {
          out.emplace_back(std::move(spec.name), std::move(spec.shape));
        }
        return out;
      },
      py::arg("config"), "(canonical name, shape) of every tensor of such heads.");
  module.def(
      "memory_of_medusa",
      [](const MedusaConfig& config, const std::string& dtype, int max_batch_size,
         const std::string& device) {
        return memory_of_medusa(config, precision_from_name(dtype), max_batch_size, device);
      },
      py::arg("config"), py::arg("dtype"), py::kw_only(), py::arg("max_batch_size"),
      py::arg("device") = "cpu", "What a Medusa drafter takes, before it is made.");

  py::class_<MedusaHeads>(module, "MedusaHeads", "Packed, immutable Medusa heads.")
      .def_property_readonly("config", &MedusaHeads::config, py::return_value_policy::copy)
      .def_property_readonly("weight_bytes", &MedusaHeads::weight_bytes);
  py::class_<MedusaBuilder>(module, "MedusaBuilder", "Takes heads' tensors one at a time.")
      .def(py::init([](const MedusaConfig& config, const std::string& dtype) {
             return MedusaBuilder(config, precision_from_name(dtype));
           }),
           py::arg("config"), py::arg("dtype"))
      .def("set", &set_tensor<MedusaBuilder>, py::arg("name"), py::arg("dtype"), py::arg("array"),
           "Packs one canonical tensor: float32, or uint16 with the bits of bfloat16.")
      .def("build", &MedusaBuilder::build, "Raises LoadError naming every tensor still missing.");
  module.def(
      "medusa_logits",
      [](const MedusaHeads& heads, const py::array_t<float, py::array::c_style>& hidden,
         const std::string& cpu_isa) {
        const std::span<const float> values(hidden.data(), static_cast<std::size_t>(hidden.size()));
        std::vector<float> logits;
        {
          const py::gil_scoped_release released;
          logits = medusa_logits(heads, values, nullptr, cpu_isa);
        }
        const MedusaConfig& config = heads.config();
        py::array_t<float> out({config.num_heads,
                                static_cast<std::int64_t>(hidden.size()) / config.hidden_size,
                                config.outputs});
        std::copy(logits.begin(), logits.end(), out.mutable_data());
        return out;
      },
      py::arg("heads"), py::arg("hidden"), py::arg("cpu_isa") = "auto",
      "What every head says of hidden states float32 [rows, hidden]: [heads, rows, outputs].");
  module.def(
      "make_medusa_drafter",
      [](const MedusaHeads& heads, const StaticTree& tree, int max_batch_size,
         std::shared_ptr<ThreadTeam> team, const std::string& cpu_isa, const std::string& device) {
        MedusaOptions options;
        options.tree = tree;
        options.max_batch_size = max_batch_size;
        options.team = std::move(team);
        options.cpu_isa = cpu_isa;
        options.device = device;
        return make_medusa_drafter(heads, options);
      },
      py::arg("heads"), py::kw_only(), py::arg("tree"), py::arg("max_batch_size"), py::arg("team"),
      py::arg("cpu_isa"), py::arg("device") = "cpu");
}

}  // namespace specrt::python
