#include "specrt/draft_tree.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace specrt::python {
namespace {

template <typename T>
std::vector<T> copy(std::span<const T> values) {
  return {values.begin(), values.end()};
}

}  // namespace

void bind_draft_tree(py::module_& module) {
  py::class_<DraftTree>(module, "DraftTree",
                        "Candidate continuations of one sequence. Node i continues node "
                        "parents[i], or the sequence itself where that is -1; parents come before "
                        "children and siblings differ in token.")
      .def(py::init([](std::vector<TokenId> tokens, std::vector<std::int32_t> parents,
                       std::vector<float> log_probs, std::string source) {
             return DraftTree(std::move(tokens), std::move(parents), std::move(log_probs),
                              std::move(source));
           }),
           py::arg("tokens"), py::arg("parents"), py::kw_only(),
           py::arg("log_probs") = std::vector<float>{}, py::arg("source") = "")
      .def_static(
          "chain",
          [](const std::vector<TokenId>& tokens, std::string source) {
            return DraftTree::chain(tokens, std::move(source));
          },
          py::arg("tokens"), py::kw_only(), py::arg("source") = "",
          "The tree in which every node's parent is the node before it.")
      .def_property_readonly("tokens", [](const DraftTree& tree) { return copy(tree.tokens()); })
      .def_property_readonly("parents", [](const DraftTree& tree) { return copy(tree.parents()); })
      .def_property_readonly(
          "depths", [](const DraftTree& tree) { return copy(tree.depths()); },
          "1 for children of the root.")
      .def_property_readonly("log_probs",
                             [](const DraftTree& tree) { return copy(tree.log_probs()); })
      .def(
          "set_distribution",
          [](DraftTree& tree, std::int32_t node, const std::vector<float>& probabilities,
             bool replacement) {
            tree.set_draw(replacement ? Draw::with_replacement : Draw::without_replacement);
            tree.set_distribution(node, probabilities);
          },
          py::arg("node"), py::arg("probabilities"), py::kw_only(), py::arg("replacement") = false,
          "Tells that the children of `node` (-1: the root) were sampled from these probabilities,"
          " one a vocabulary id: for verification='rejection'.")
      .def_property_readonly("source", &DraftTree::source)
      .def_property_readonly("max_depth", &DraftTree::max_depth)
      .def("__len__", &DraftTree::size);
}

}  // namespace specrt::python
