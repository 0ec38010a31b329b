#include "specrt/constraint.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "specrt/error.h"

namespace specrt::python {
namespace {

/// A constraint written in Python: an object with fill_bitmask(mask), advance(token), finished(),
/// accepts(tokens) and fork().
class PythonConstraint final : public TokenConstraint {
 public:
  explicit PythonConstraint(py::object object) : object_(std::move(object)) {}

  ~PythonConstraint() override {
    const py::gil_scoped_acquire held;
    object_ = py::object();
  }

  void fill_bitmask(std::span<std::uint32_t> mask) override {
    call([&] {
      // A view of the core's own words, only for the length of the call.
      const py::array_t<std::uint32_t> view(static_cast<py::ssize_t>(mask.size()), mask.data(),
                                            py::capsule(mask.data(), [](void*) {}));
      object_.attr("fill_bitmask")(view);
    });
  }
  void advance(TokenId token) override {
    call([&] { object_.attr("advance")(token); });
  }
  bool finished() const override {
    bool result = false;
    call([&] { result = object_.attr("finished")().cast<bool>(); });
    return result;
  }
  std::int64_t accepts(std::span<const TokenId> tokens) override {
    std::int64_t count = 0;
    call([&] {
      count = object_.attr("accepts")(std::vector<TokenId>(tokens.begin(), tokens.end()))
                  .cast<std::int64_t>();
    });
    if (count < 0 || count > static_cast<std::int64_t>(tokens.size())) {
      throw Error(expected_got("accepts", "from 0 to " + std::to_string(tokens.size()),
                               std::to_string(count)));
    }
    return count;
  }
  std::unique_ptr<TokenConstraint> fork() const override {
    std::unique_ptr<TokenConstraint> copy;
    call([&] { copy = std::make_unique<PythonConstraint>(object_.attr("fork")()); });
    return copy;
  }

 private:
  template <typename Body>
  static void call(const Body& body) {
    call_python("[constraint] ", body);
  }

  py::object object_;
};

}  // namespace

void bind_constraint(py::module_& module) {
  py::class_<TokenConstraint, std::shared_ptr<TokenConstraint>>(
      module, "TokenConstraint", "Decides which tokens may come next, as the core sees it.");
  module.def(
      "make_python_constraint",
      [](py::object object) -> std::shared_ptr<TokenConstraint> {
        return std::make_shared<PythonConstraint>(std::move(object));
      },
      py::arg("object"),
      "Wraps an object with fill_bitmask(mask), advance(token), finished(), accepts(tokens) and "
      "fork().");
}

}  // namespace specrt::python
