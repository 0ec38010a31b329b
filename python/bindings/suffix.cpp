#include "specrt/suffix.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings.h"

namespace specrt::python {

void bind_suffix(py::module_& module) {
  py::class_<SuffixCache, std::shared_ptr<SuffixCache>>(
      module, "SuffixCache",
      "Responses of earlier requests, for the suffix drafters of one or more engines with one "
      "vocabulary; the oldest give way. Safe to use from several threads.")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t>(), py::kw_only(),
           py::arg("max_depth") = 24, py::arg("max_requests") = 10000,
           py::arg("max_tokens") = std::int64_t{1} << 18,
           "max_depth bounds a match and its draft together, the others what is kept.")
      .def(
          "add",
          [](SuffixCache& cache, const std::vector<TokenId>& response) {
            const py::gil_scoped_release released;
            cache.add(response);
          },
          py::arg("response"), "Keeps the token ids of a response.")
      .def("set_vocabulary", &SuffixCache::set_vocabulary, py::arg("size"),
           "Says of which vocabulary the responses are; raises where another one was said before.")
      .def_property_readonly("max_depth", &SuffixCache::max_depth)
      .def_property_readonly("requests", &SuffixCache::requests, "Responses kept.")
      .def_property_readonly("tokens", &SuffixCache::tokens, "Tokens of them.")
      .def_property_readonly("bytes", &SuffixCache::bytes, "Memory held.")
      .def_property_readonly("max_bytes", &SuffixCache::max_bytes, "What `bytes` can come to.")
      .def("check_invariants", &SuffixCache::check_invariants,
           py::call_guard<py::gil_scoped_release>(), "For tests.");

  module.def(
      "make_suffix_drafter",
      [](std::int64_t max_tree_depth, double max_spec_factor, double max_spec_offset,
         double min_token_prob, bool use_tree_spec,
         std::optional<std::shared_ptr<SuffixCache>> cache) {
        SuffixOptions options;
        options.max_tree_depth = max_tree_depth;
        options.max_spec_factor = max_spec_factor;
        options.max_spec_offset = max_spec_offset;
        options.min_token_prob = min_token_prob;
        options.use_tree_spec = use_tree_spec;
        options.cache = cache.value_or(nullptr);
        return make_suffix_drafter(options);
      },
      py::kw_only(), py::arg("max_tree_depth"), py::arg("max_spec_factor"),
      py::arg("max_spec_offset"), py::arg("min_token_prob"), py::arg("use_tree_spec"),
      py::arg("cache") = py::none());
}

}  // namespace specrt::python
