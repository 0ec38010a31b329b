#include "specrt/cpu.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_cpu(py::module_& module) {
  module.def(
      "cpu_isa", [] { return std::string(name_of(best_cpu_isa())); },
      "The best instruction-set level that this machine runs: 'amx', 'avx512', 'avx2' or "
      "'scalar'.");
  module.def(
      "available_cpu_isas",
      [] {
        std::vector<std::string> names;
        for (const CpuIsa isa : available_cpu_isas()) names.emplace_back(name_of(isa));
        return names;
      },
      "The levels that this build has and this machine can run, ascending.");
  module.def(
      "resolve_cpu_isa",
      [](const std::string& name) { return std::string(name_of(cpu_isa_from_name(name))); },
      py::arg("name"), "'auto' or a level's name to the level; raises where it cannot run here.");
  module.def("default_thread_count", &default_thread_count,
             "Cores that this process may use: affinity mask, then cgroup quota.");
  py::class_<ThreadTeam, std::shared_ptr<ThreadTeam>>(module, "ThreadTeam",
                                                      "Threads that compute for one engine.")
      .def(py::init<int, bool>(), py::arg("threads") = 0, py::arg("pin") = false)
      .def_property_readonly("size", &ThreadTeam::size);
}

}  // namespace specrt::python
