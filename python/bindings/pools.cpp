#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "longspan/attention/pool_tokens.h"
#include "longspan/attention/state_tables.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/plan/attention_layout.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

Pass pass_of(const char* who, const std::string& name) {
  if (name == "forward") return Pass::forward;
  check(name == "backward", who, ": pass '", name,
        "' is not one of forward, backward");
  return Pass::backward;
}

/// A list of numbers as a tensor of its own.
template <class T>
at::Tensor tensor_of(const std::vector<T>& numbers) {
  return at::tensor(numbers,
                    at::TensorOptions(c10::CppTypeToScalarType<T>::value));
}

at::Tensor side_of(const std::vector<TokenRange>& ranges,
                   int64_t TokenRange::* side) {
  at::Tensor column = at::empty({std::ssize(ranges)}, at::kInt);
  int32_t* entry = column.mutable_data_ptr<int32_t>();
  for (TokenRange range : ranges) *entry++ = static_cast<int32_t>(range.*side);
  return column;
}

void bind_halo(py::module_& m) {
  py::class_<HaloPlan>(m, "HaloPlan")
      .def_static(
          "of",
          [](const Ownership& ownership, std::vector<Mask> masks, int64_t count,
             int rank, int64_t rows) {
            return HaloPlan::of(
                AttentionLayout::of(ownership, std::move(masks)), count, rank,
                rows);
          },
          py::arg("ownership"), py::arg("masks"), py::arg("count"),
          py::arg("rank"), py::arg("rows"), NoGil())
      .def_property_readonly(
          "runs",
          [](const HaloPlan& plan) {
            std::vector<std::pair<int64_t, DocumentRun>> runs;
            for (const auto& [row, run] : plan.runs()) {
              runs.emplace_back(row, run);
            }
            return runs;
          })
      .def_property_readonly("received", &HaloPlan::received)
      .def_property_readonly(
          "sends",
          [](const HaloPlan& plan) { return sends_tensor(plan.sends()); })
      .def_property_readonly(
          "places",
          [](const HaloPlan& plan) { return tensor_of(plan.places()); })
      .def_property_readonly(
          "seen",
          [](const HaloPlan& plan) {
            const int64_t width = plan.count() + 1;
            const auto lists = plan.seen();
            return tensor_of(lists).view({std::ssize(lists) / width, width});
          })
      .def(
          "sent_bytes",
          [](const HaloPlan& plan, const std::string& pass, int64_t bytes) {
            return plan.sent_bytes(bytes, pass_of("HaloPlan", pass));
          },
          py::arg("pass"), py::arg("bytes"))
      .def("__repr__", &HaloPlan::to_string);
}

void bind_pool_plan(py::module_& m) {
  py::class_<PoolPlan>(m, "PoolPlan")
      .def_static(
          "of",
          [](const Ownership& ownership, std::vector<Mask> masks, int64_t ratio,
             bool overlap, int rank, int64_t rows) {
            return PoolPlan::of(
                AttentionLayout::of(ownership, std::move(masks)), ratio,
                overlap ? PoolOverlap::previous : PoolOverlap::none, rank,
                rows);
          },
          py::arg("ownership"), py::arg("masks"), py::arg("ratio"),
          py::arg("overlap"), py::arg("rank"), py::arg("rows"), NoGil())
      .def_property_readonly("sizes", &PoolPlan::sizes)
      .def_property_readonly("whole", &PoolPlan::whole)
      .def_property_readonly("received", &PoolPlan::received)
      .def_property_readonly("halves", &PoolPlan::halves)
      .def_property_readonly(
          "positions",
          [](const PoolPlan& plan) { return tensor_of(plan.positions()); })
      .def_property_readonly("windows",
                             [](const PoolPlan& plan) {
                               return std::pair{
                                   side_of(plan.windows(), &TokenRange::begin),
                                   side_of(plan.windows(), &TokenRange::end)};
                             })
      .def_property_readonly(
          "ended",
          [](const PoolPlan& plan) {
            int64_t most = 0;
            for (TokenRange window : plan.windows()) {
              most = std::max(most, window.size());
            }
            const auto column = [&](int64_t TokenRange::* side) {
              return side_of(plan.windows(), side).unsqueeze(1);
            };
            const at::Tensor pool =
                at::arange(most, at::kInt) + column(&TokenRange::begin);
            return pool.masked_fill(pool >= column(&TokenRange::end), -1);
          })
      .def_property_readonly(
          "tables",
          [](const PoolPlan& plan) {
            const auto tables = PoolTables::of(plan, at::kCPU);
            return std::tuple{tables.lists, tables.sends, tables.merges,
                              tables.order, tables.in_stream};
          })
      .def(
          "sent_bytes",
          [](const PoolPlan& plan, const std::string& pass, int64_t channels,
             int64_t bytes_per_sum) {
            return plan.sent_bytes(channels, bytes_per_sum,
                                   pass_of("PoolPlan", pass));
          },
          py::arg("pass"), py::arg("channels"), py::arg("bytes_per_sum"))
      .def(
          "gathered_bytes",
          [](const PoolPlan& plan, const std::string& pass, int64_t bytes) {
            return plan.gathered_bytes(bytes, pass_of("PoolPlan", pass));
          },
          py::arg("pass"), py::arg("bytes"))
      .def("__repr__", &PoolPlan::to_string);
}

void bind_state_plan(py::module_& m) {
  py::class_<StatePlan>(m, "StatePlan")
      .def_static(
          "of",
          [](const Ownership& ownership, std::vector<Mask> masks, int rank,
             int64_t rows, const std::string& way) {
            return StatePlan::of(
                AttentionLayout::of(ownership, std::move(masks)), rank, rows,
                state_way_named(way));
          },
          py::arg("ownership"), py::arg("masks"), py::arg("rank"),
          py::arg("rows"), py::arg("way"), NoGil())
      .def_static(
          "choose",
          [](const Ownership& ownership, std::vector<Mask> masks, int64_t rows,
             int64_t bytes_per_transition, int64_t bytes_per_state,
             int64_t matrix_rows) {
            return name_of(StatePlan::choose(
                AttentionLayout::of(ownership, std::move(masks)),
                {.transition_bytes = bytes_per_transition,
                 .state_bytes = bytes_per_state,
                 .matrix_rows = matrix_rows},
                rows));
          },
          py::arg("ownership"), py::arg("masks"), py::arg("rows"),
          py::arg("bytes_per_transition"), py::arg("bytes_per_state"),
          py::arg("matrix_rows"), NoGil())
      .def_property_readonly(
          "way", [](const StatePlan& plan) { return name_of(plan.way()); })
      .def_property_readonly(
          "rounds",
          [](const StatePlan& plan) { return plan.rounds(Pass::forward); })
      .def_property_readonly(
          "runs",
          [](const StatePlan& plan) {
            std::vector<std::pair<int64_t, DocumentRun>> runs;
            for (const auto& [row, run] : plan.runs()) {
              runs.emplace_back(row, run);
            }
            return runs;
          })
      .def_property_readonly("chained", &StatePlan::chained)
      .def_property_readonly("tables",
                             [](const StatePlan& plan) {
                               const StateTables tables = state_tables(plan);
                               return std::tuple{tables.sends, tables.steps,
                                                 tables.back_sends,
                                                 tables.back_steps};
                             })
      .def(
          "sent_bytes",
          [](const StatePlan& plan, const std::string& pass,
             int64_t bytes_per_transition, int64_t bytes_per_state) {
            return plan.sent_bytes(bytes_per_transition, bytes_per_state,
                                   pass_of("StatePlan", pass));
          },
          py::arg("pass"), py::arg("bytes_per_transition"),
          py::arg("bytes_per_state"))
      .def("__repr__", &StatePlan::to_string);
}

}  // namespace

void bind_pools(py::module_& m) {
  bind_halo(m);
  bind_pool_plan(m);
  bind_state_plan(m);
}

}  // namespace longspan::python
