#include <torch/csrc/utils/pybind.h>

#include "longspan/attention/attend.h"
#include "longspan/comm/needed.h"
#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/ops/key_windows.h"
#include "longspan/ops/partial_attention.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_attention(py::module_& m) {
  m.def(
      "attention_layout",
      [](const Ownership& ownership, std::vector<Mask> masks) {
        return layout_tensor(AttentionLayout::of(ownership, std::move(masks)));
      },
      py::arg("ownership"), py::arg("masks"));
  m.def(
      "attention_layout_values",
      [](const at::Tensor& tensor) {
        const at::Tensor code = tensor.to(at::kCPU, at::kLong).contiguous();
        AttentionLayout layout =
            AttentionLayout::decode({code.const_data_ptr<int64_t>(),
                                     static_cast<std::size_t>(code.numel())});
        return std::pair{std::move(layout.ownership), std::move(layout.masks)};
      },
      py::arg("tensor"));
  // What else is made from masks is here too: one source fewer knows them.
  m.def(
      "key_windows",
      [](const Mask& mask, const Ownership* ownership,
         std::optional<int> rank) {
        check((ownership == nullptr) == !rank.has_value(),
              "key_windows: give an ownership and a rank, or neither");
        const int64_t entries =
            ownership ? ownership->local_tokens(*rank) : mask.queries();
        check(entries <= kMostEntries, "key_windows: an array of ", entries,
              " tokens; at most ", kMostEntries, " are written out");
        check(ownership == nullptr || ownership->tokens() == mask.queries(),
              "key_windows: a mask of ", mask.queries(),
              " queries over an ownership of ",
              ownership ? ownership->tokens() : 0, " tokens");
        const KeyWindows windows =
            ownership ? key_windows(mask, ownership->ranges_of(*rank))
                      : key_windows(mask);
        return std::pair{windows.begin, windows.end};
      },
      py::arg("mask"), py::arg("ownership") = py::none(),
      py::arg("rank") = py::none(), NoGil());
  m.def(
      "needed_table",
      [](const Mask& mask, const Ownership& ownership) {
        check_listable("needed_table", ownership);
        return needed_table(mask, ownership);
      },
      py::arg("mask"), py::arg("ownership"));
  py::class_<KernelLevel>(m, "KernelLevel")
      .def_property_readonly(
          "name",
          [](const KernelLevel& level) { return std::string(level.name); })
      .def_readonly("why_not", &KernelLevel::why_not)
      .def("__repr__", [](const KernelLevel& level) {
        return level.why_not.empty()
                   ? std::string(level.name)
                   : join(level.name, ", not here: ", level.why_not);
      });
  m.def("kernel_levels", [] {
    return std::vector(kernel_levels().begin(), kernel_levels().end());
  });
  m.def(
      "which_kernel",
      [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
         const std::vector<Mask>& masks, double softcap) {
        AttendOptions options;
        options.softcap = softcap;
        return which_kernel(q, k, v, masks, options);
      },
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("masks"),
      py::arg("softcap") = 0.0);
  m.def(
      "merge",
      [](const at::Tensor& out, const at::Tensor& lse,
         const at::Tensor& other_out, const at::Tensor& other_lse) {
        const auto both =
            PartialAttention::merge({out, lse}, {other_out, other_lse});
        return std::pair{both.out, both.lse};
      },
      py::arg("out"), py::arg("lse"), py::arg("other_out"),
      py::arg("other_lse"));
}

}  // namespace longspan::python
