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
}

}  // namespace specrt::python
