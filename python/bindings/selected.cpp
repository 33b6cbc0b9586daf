#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "longspan/attention/detail/selected_comparison.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected.h"
#include "longspan/ops/select_keys.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

template <class Work>
Work named_work(const char* who, const std::string& name,
                const std::vector<std::pair<std::string, Work>>& all) {
  std::string names;
  for (const auto& [known, work] : all) {
    if (known == name) return work;
    names += (names.empty() ? "" : ", ") + known;
  }
  throw std::invalid_argument(
      join(who, ": work is \"", name, "\"; expected one of ", names));
}

}  // namespace

void bind_selected(py::module_& m) {
  m.def(
      "which_selected_kernel",
      [](const at::Tensor& q, const at::Tensor& kv, const at::Tensor& indices,
         int64_t value_dim, const std::string& work) {
        const auto named =
            named_work<SelectedWork>("which_selected_kernel", work,
                                     {{"forward", SelectedWork::forward},
                                      {"backward", SelectedWork::backward},
                                      {"weights", SelectedWork::weights}});
        return which_selected_kernel(q, kv, indices, value_dim, named);
      },
      py::arg("q"), py::arg("kv"), py::arg("indices"), py::arg("value_dim"),
      py::arg("work"));
  m.def(
      "which_indexer_kernel",
      [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& weights,
         int64_t slots, const std::string& work) {
        const auto named = named_work<IndexerWork>(
            "which_indexer_kernel", work,
            {{"select", IndexerWork::select},
             {"score", IndexerWork::score},
             {"score_backward", IndexerWork::score_backward}});
        return which_indexer_kernel(q, k, weights, slots, named);
      },
      py::arg("q"), py::arg("k"), py::arg("weights"), py::arg("slots"),
      py::arg("work"));
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
