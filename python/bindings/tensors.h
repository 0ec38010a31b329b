#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "specrt/error.h"
#include "specrt/types.h"

namespace specrt::python {

/// Builder::set with an array of the dtype that is said.
template <typename Builder>
void set_tensor(Builder& builder, const std::string& name, const std::string& dtype,
                const py::array& array) {
  const DType type = dtype_from_name(dtype);
  const bool fits = type == DType::f32 ? py::isinstance<py::array_t<float>>(array)
                                       : py::isinstance<py::array_t<std::uint16_t>>(array);
  if (!fits || !(array.flags() & py::array::c_style)) {
    throw InvalidArgument(
        expected_got(name,
                     std::string("a C-contiguous array of ") +
                         (type == DType::f32 ? "float32" : "uint16 holding bfloat16"),
                     py::str(array.dtype()).cast<std::string>()));
  }
  const std::vector<std::int64_t> shape(array.shape(), array.shape() + array.ndim());
  const void* data = array.data();
  const py::gil_scoped_release released;
  builder.set(name, shape, type, data);
}

}  // namespace specrt::python
