#include "specrt/cuda.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_cuda(py::module_& module) {
  py::class_<CudaDevice>(module, "CudaDevice", "A GPU that this process sees.")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("architecture", &CudaDevice::architecture,
                    "Compute capability, major * 10 + minor.")
      .def_readonly("memory", &CudaDevice::memory, "Bytes.");
  module.def("cuda_built", &cuda_built, "Whether this build has CUDA kernels (SPECRT_CUDA).");
  module.def("cuda_devices", &cuda_devices,
             "The GPUs of this machine, none where there is no driver. Raises UnsupportedError "
             "where specrt was built without CUDA.");
  module.def("cuda_free_memory", &cuda_free_memory, py::arg("device"),
             "Bytes of a GPU's memory that nobody has taken. Raises as cuda_devices() does, and "
             "InvalidArgumentError where there is no such GPU.");
  py::class_<CudaCounts>(module, "CudaCounts", "What this process has asked of GPUs.")
      .def_readonly("launches", &CudaCounts::launches, "Of kernels and of graphs.")
      .def_readonly("copies_to_host", &CudaCounts::copies_to_host)
      .def_readonly("waits", &CudaCounts::waits, "Of the host for a GPU.")
      .def_readonly("allocations", &CudaCounts::allocations, "Of device and of pinned memory.");
  module.def("cuda_counts", &cuda_counts,
             "What this process has asked of GPUs since it began; zeros where specrt was built "
             "without CUDA.");
}

}  // namespace specrt::python
