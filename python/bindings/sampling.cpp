#include "specrt/sampling.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_sampling(py::module_& module) {
  py::class_<SamplingParams>(module, "CoreSamplingParams",
                             "The part of specrt.SamplingParams that the core applies.")
      .def(py::init([](std::int64_t max_tokens, double temperature, std::int64_t top_k, double top_p,
                       double min_p, std::uint64_t seed, std::uint32_t sample_index,
                       std::vector<TokenId> stop_token_ids, std::int32_t logprobs) {
             SamplingParams params;
             params.max_tokens = max_tokens;
             params.temperature = temperature;
             params.top_k = top_k;
             params.top_p = top_p;
             params.min_p = min_p;
             params.seed = seed;
             params.sample_index = sample_index;
             params.stop_token_ids = std::move(stop_token_ids);
             params.logprobs = logprobs;
             return params;
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("temperature") = 0.0, py::arg("top_k") = 0,
           py::arg("top_p") = 1.0, py::arg("min_p") = 0.0, py::arg("seed") = 0,
           py::arg("sample_index") = 0, py::arg("stop_token_ids") = std::vector<TokenId>{},
           py::arg("logprobs") = -1)
      .def("check", &SamplingParams::check, py::arg("vocab_size"));
}

}  // namespace specrt::python
