#include <unistd.h>

#include "bindings.h"

namespace specrt::python {

void bind_bell(py::module_& module) {
  module.def(
      "ring",
      [](int pipe) {
        // Does not wait, so it keeps the GIL; a full pipe has been rung already.
        const char one = 1;
        [[maybe_unused]] const auto written = ::write(pipe, &one, 1);
      },
      py::arg("pipe"), "Writes a byte to a pipe that does not block, and keeps the GIL.");
}

}  // namespace specrt::python
