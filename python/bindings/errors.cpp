#include <atomic>
#include <string>

#include "bindings.h"
#include "specrt/device_error.h"
#include "specrt/error.h"

namespace specrt::python {
namespace {

std::atomic<bool> interrupted{false};

}  // namespace

void note_interrupt() { interrupted.store(true); }

void raise_noted_interrupt() {
  if (!interrupted.exchange(false)) return;
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw py::error_already_set();
}

// The Python classes live in specrt.errors, so that pure Python code can raise them too.
void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](const char* name, const std::exception& error) {
      const py::object type = py::module_::import("specrt.errors").attr(name);
      // A message may quote bytes of a damaged file.
      const std::string text = error.what();
      const auto message = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
          text.data(), static_cast<py::ssize_t>(text.size()), "backslashreplace"));
      PyErr_SetObject(type.ptr(), message.ptr());
    };
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InvalidArgument& error) {
      raise("InvalidArgumentError", error);
    } catch (const LoadError& error) {
      raise("LoadError", error);
    } catch (const UnsupportedError& error) {
      raise("UnsupportedError", error);
    } catch (const CapacityError& error) {
      raise("CapacityError", error);
    } catch (const NumericError& error) {
      raise("NumericError", error);
    } catch (const DeviceError& error) {
      raise("DeviceError", error);
    } catch (const InternalError& error) {
      raise("InternalError", error);
    } catch (const Error& error) {
      raise("SpecrtError", error);
    }
  });
}

}  // namespace specrt::python
