#include "specrt/merge.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_merge(py::module_& module) {
  module.def(
      "make_merge_drafter",
      [](const std::vector<std::shared_ptr<Drafter>>& parts, std::int64_t target_bytes) {
        return make_merge_drafter({parts, target_bytes});
      },
      py::arg("parts"), py::kw_only(), py::arg("target_bytes"));
}

}  // namespace specrt::python
