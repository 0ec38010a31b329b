#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "specrt/error.h"

namespace specrt::python {

namespace py = pybind11;

/// Ctrl-C that Python code raised inside a round. The core knows no such thing: it ends the request
/// concerned, and the interrupt goes on once the round is over.
void note_interrupt();
/// Throws KeyboardInterrupt where one was noted.
void raise_noted_interrupt();

/// Runs Python code on the core's behalf, with the lock held. Python exceptions may not outlive the
/// lock, so only their text goes on, behind `prefix`, as an Error; Ctrl-C is not the called code's
/// error and goes on once the round is over.
template <typename Body>
void call_python(const char* prefix, const Body& body) {
  const py::gil_scoped_acquire held;
  std::string text;
  try {
    body();
    return;
  } catch (const py::error_already_set& error) {
    text = error.what();
    if (error.matches(PyExc_KeyboardInterrupt)) note_interrupt();
  } catch (const py::cast_error& error) {
    text = error.what();
  }
  throw Error(prefix + text);
}

// One a public header; module.cpp calls them in the order in which they build on each other.
void bind_errors(py::module_& module);
void bind_bell(py::module_& module);
void bind_cpu(py::module_& module);
void bind_cuda(py::module_& module);
void bind_memory(py::module_& module);
void bind_draft_tree(py::module_& module);
void bind_static_tree(py::module_& module);
void bind_constraint(py::module_& module);
void bind_planner(py::module_& module);
void bind_sampling(py::module_& module);
void bind_model(py::module_& module);
void bind_calibration(py::module_& module);
void bind_drafter(py::module_& module);
void bind_features(py::module_& module);
void bind_medusa(py::module_& module);
void bind_suffix(py::module_& module);
void bind_merge(py::module_& module);
void bind_decoder(py::module_& module);

}  // namespace specrt::python
