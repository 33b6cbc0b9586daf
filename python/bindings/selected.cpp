#include <torch/csrc/utils/pybind.h>

#include "longspan/attention/selected_comparison.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

void bind_selected(py::module_& m) {
  py::class_<SelectionComparison>(m, "SelectionComparison")
      .def_readonly("slots", &SelectionComparison::slots)
      .def_readonly("differing", &SelectionComparison::differing)
      .def_readonly("queries", &SelectionComparison::queries)
      .def_readonly("per_query", &SelectionComparison::per_query)
      .def_readonly("worst_gap", &SelectionComparison::worst_gap)
      .def_readonly("worst_query", &SelectionComparison::worst_query)
      .def("__repr__", &SelectionComparison::to_string);
  m.def("compare_selections", &compare_selections, py::arg("a"), py::arg("b"),
        py::arg("q"), py::arg("k"), py::arg("weights"), py::arg("layout"),
        py::arg("group"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace longspan::python
