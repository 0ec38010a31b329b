#include "specrt/static_tree.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {

void bind_static_tree(py::module_& module) {
  py::class_<StaticTree>(module, "StaticTree", "A fixed shape for drafts: a path of ranks a node.")
      .def(py::init<const std::vector<StaticTree::Path>&>(), py::arg("paths"))
      .def_static("chain", &StaticTree::chain, py::arg("depth"))
      .def_static("mc_sim_7b_63", &StaticTree::mc_sim_7b_63)
      .def_static("from_accuracies", &StaticTree::from_accuracies, py::arg("accuracies"),
                  py::arg("nodes"),
                  "The nodes that are accepted most often in sum; accuracies[d][r] is how often "
                  "rank r at depth d + 1 is right once the path to it was.")
      .def_property_readonly("paths", &StaticTree::paths)
      .def_property_readonly("depth", &StaticTree::depth)
      .def_property_readonly("is_chain", &StaticTree::is_chain)
      .def("cut", &StaticTree::cut, py::arg("depth"), "Without the nodes deeper than `depth`.")
      .def("__len__", [](const StaticTree& tree) { return tree.nodes().size(); });
}

}  // namespace specrt::python
