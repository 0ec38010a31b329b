#include "specrt/memory.h"

#include "bindings.h"

namespace specrt::python {

void bind_memory(py::module_& module) {
  py::class_<MemoryUse>(module, "MemoryUse", "Bytes by purpose.")
      .def_readonly("weights", &MemoryUse::weights)
      .def_readonly("kv_cache", &MemoryUse::kv_cache)
      .def_readonly("workspace", &MemoryUse::workspace)
      .def_readonly("other", &MemoryUse::other)
      .def_property_readonly("total", &MemoryUse::total);
}

}  // namespace specrt::python
