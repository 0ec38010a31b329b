#include "specrt/calibration.h"

#include <pybind11/numpy.h>

#include <utility>
#include <vector>

#include "bindings.h"
#include "specrt/error.h"

namespace specrt::python {
namespace {

using Floats = py::array_t<float, py::array::c_style>;

/// The values as an array that owns them, [rows, size / rows]; nothing is copied.
template <typename T>
py::array_t<T> matrix(std::vector<T>&& values, py::ssize_t rows) {
  auto* kept = new std::vector<T>(std::move(values));
  const py::capsule owner(kept,
                          [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  const auto columns = rows == 0 ? 0 : static_cast<py::ssize_t>(kept->size()) / rows;
  return py::array_t<T>({rows, columns}, kept->data(), owner);
}

void check_matrix(const Floats& array, const char* what) {
  if (array.ndim() != 2) {
    throw InvalidArgument(expected_got(what, "two dimensions", std::to_string(array.ndim())));
  }
}

std::span<const float> values(const Floats& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

}  // namespace

void bind_calibration(py::module_& module) {
  module.def(
      "trace_layer",
      [](const Model& layer, const Floats& stream) {
        check_matrix(stream, "stream");
        LayerTrace trace;
        {
          const py::gil_scoped_release released;
          trace = trace_layer(layer, values(stream));
        }
        const py::ssize_t rows = stream.shape(0);
        return py::make_tuple(
            matrix(std::move(trace.attention), rows), matrix(std::move(trace.output), rows),
            matrix(std::move(trace.mlp), rows), matrix(std::move(trace.down), rows),
            matrix(std::move(trace.stream), rows));
      },
      py::arg("layer"), py::arg("stream"),
      "What a one-layer model's matrices read when `stream` [positions, hidden] takes the place\n"
      "of embeddings: inputs of q, k, v; of o; of gate, up; of down; then the stream behind it.");
  module.def(
      "quantise_compensated",
      [](const Floats& weights, const Floats& factor) {
        check_matrix(weights, "weights");
        check_matrix(factor, "factor");
        if (factor.shape(0) != factor.shape(1) || factor.shape(0) != weights.shape(1)) {
          throw InvalidArgument(
              expected_got("factor", "[width, width] of weights [n, width]", "another shape"));
        }
        CompensatedGroup group;
        {
          const py::gil_scoped_release released;
          group = quantise_compensated(values(weights), values(factor));
        }
        const py::ssize_t n = weights.shape(0);
        return py::make_tuple(matrix(std::move(group.codes), n), matrix(std::move(group.scales), n),
                              matrix(std::move(group.minima), n),
                              matrix(std::move(group.errors), n));
      },
      py::arg("weights"), py::arg("factor"),
      "Rounds a group of at most 32 inputs [n, width] to int4, each input's error made up for by\n"
      "those behind it. `factor` [width, width] is the group's block of the upper Cholesky factor\n"
      "of the inverse of the inputs' second moments. Gives codes [n, width], scales and minima\n"
      "[n, 1], and errors [n, width]: inputs behind the group change by -errors @ U[group, "
      "behind].");
}

}  // namespace specrt::python
