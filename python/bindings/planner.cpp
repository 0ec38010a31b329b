#include "specrt/planner.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "specrt/speculation.h"

namespace specrt::python {

void bind_planner(py::module_& module) {
  py::class_<CostModel>(module, "CostModel",
                        "What rounds cost on this machine, in seconds; it follows what they take.")
      .def("pass_seconds", &CostModel::pass_seconds, py::arg("rows"), py::arg("sequences") = 1,
           py::arg("context") = 0,
           "A pass of so many rows of so many sequences with so many tokens of context in all.")
      .def(
          "draft_seconds",
          [](const CostModel& model, const std::string& drafter, std::int64_t steps,
             std::int64_t sequences, double step_share) {
            return model.draft_seconds(drafter, step_share, steps, sequences);
          },
          py::arg("drafter"), py::arg("steps"), py::arg("sequences") = 1,
          py::arg("step_share") = 0.0,
          "Drafting so many tokens of depth for so many sequences; step_share stands in for a\n"
          "drafter of which nothing is known.")
      .def_property_readonly("measured", &CostModel::measured,
                             "False: a guess, right up to what passes have shown since.")
      .def_property_readonly("table", &CostModel::table, "(rows, seconds), up to `scale`.")
      .def_property_readonly("scale", &CostModel::scale, "Of all passes, as last seen.")
      .def_property_readonly("per_sequence", &CostModel::per_sequence)
      .def_property_readonly("per_token", &CostModel::per_token)
      .def_property_readonly("drafters",
                             [](const CostModel& model) {
                               std::vector<std::string> names;
                               for (const auto& [name, cost] : model.drafts()) {
                                 names.push_back(name);
                               }
                               return names;
                             })
      .def("text", &CostModel::text, "As text, for a file; parse() reads it.")
      .def("__str__", &CostModel::text)
      .def_static("parse", &CostModel::parse, py::arg("text"));
}

}  // namespace specrt::python
