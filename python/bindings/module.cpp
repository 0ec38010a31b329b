#include "bindings.h"
#include "specrt/version.h"

PYBIND11_MODULE(_core, module) {
  using namespace specrt::python;
  module.doc() = "The C++ core of specrt. Private: use the names that the specrt package exports.";
  module.attr("__version__") = SPECRT_VERSION;
  bind_errors(module);
  bind_bell(module);
  bind_cpu(module);
  bind_cuda(module);
  bind_memory(module);
  bind_draft_tree(module);
  bind_static_tree(module);
  bind_constraint(module);
  bind_planner(module);
  bind_sampling(module);
  bind_model(module);
  bind_calibration(module);
  bind_drafter(module);
  bind_features(module);
  bind_medusa(module);
  bind_suffix(module);
  bind_merge(module);
  bind_decoder(module);
}
