#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "compat/nemo/cpp/padding.h"
#include "compat/nemo/cpp/reference.h"
#include "longspan/batch/shard.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/padding.h"
#include "longspan/plan/detail/ring.h"
#include "python/bindings/scalar.h"

namespace py = pybind11;

namespace longspan::nemo {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

Rule rule_of(bool strict) {
  return strict ? Rule::reference : Rule::corrected;
}

void bind(py::module_& m) {
  m.def(
      "pad_tokens",
      [](const at::Tensor& tensor, int64_t axis, int64_t count,
         const py::object& value) {
        const at::Scalar fill = python::scalar_of(value, "pad_tokens");
        const py::gil_scoped_release release;
        return pad_tokens(tensor, axis, count, fill);
      },
      py::arg("tensor"), py::arg("axis"), py::arg("count"), py::arg("value"));
  m.def(
      "pads_for",
      [](const std::string& kind, int64_t tokens, int ranks, int64_t share) {
        const auto named = ownership_kind(kind);
        check(named.has_value(), "pads_for: '", kind,
              "' is not an ownership kind");
        return pads_for(*named, tokens, ranks, share);
      },
      py::arg("kind"), py::arg("tokens"), py::arg("ranks"),
      py::arg("share") = 1);
  m.def("ring_owner", &ring_owner, py::arg("rank"), py::arg("step"),
        py::arg("ranks"));
  m.def("continue_positions", &continue_positions, py::arg("positions"),
        py::arg("axis"), py::arg("count"), NoGil());
  m.def("take_share", &take_share, py::arg("tensor"), py::arg("ownership"),
        py::arg("rank"), py::arg("axis"), NoGil());
  m.def(
      "thd_lengths",
      [](const at::Tensor& seq_lens,
         const std::optional<at::Tensor>& seq_lens_padded, int64_t sentinel,
         int64_t rows, int64_t row_length, bool strict) {
        const ThdLengths lengths =
            thd_lengths(seq_lens, seq_lens_padded, sentinel, rows, row_length,
                        rule_of(strict));
        return std::tuple{lengths.cu, lengths.cu_padded, lengths.max_seqlen,
                          lengths.padding_mask};
      },
      py::arg("seq_lens"), py::arg("seq_lens_padded"), py::arg("sentinel"),
      py::arg("rows"), py::arg("row_length"), py::arg("strict"));
  m.def(
      "document_partition",
      [](const at::Tensor& cu, int64_t total, int ranks, int rank,
         bool strict) {
        return document_partition(cu, total, ranks, rank, rule_of(strict));
      },
      py::arg("cu"), py::arg("total"), py::arg("ranks"), py::arg("rank"),
      py::arg("strict"));
  m.def(
      "padded_windows",
      [](const at::Tensor& cu, const at::Tensor& cu_padded) {
        const KeyWindows windows = padded_windows(cu, cu_padded);
        return std::pair{windows.begin, windows.end};
      },
      py::arg("cu"), py::arg("cu_padded"));
  m.def(
      "compact_windows",
      [](const at::Tensor& cu) {
        const KeyWindows windows = compact_windows(cu);
        return std::pair{windows.begin, windows.end};
      },
      py::arg("cu"));
  m.def(
      "pads_of_mask",
      [](const at::Tensor& mask, bool strict) {
        return pads_of_mask(mask, rule_of(strict));
      },
      py::arg("mask"), py::arg("strict"));
  m.def("dense_causal_mask", &dense_causal_mask, py::arg("position_ids"),
        py::arg("key_len"), py::arg("dtype"), py::arg("pad_full"),
        py::arg("window"));
}

}  // namespace

}  // namespace longspan::nemo

PYBIND11_MODULE(_nemo, m) {
  m.doc() = "The reference's forms of lengths, partitions, windows and masks.";
  longspan::nemo::bind(m);
}
