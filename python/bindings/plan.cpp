#include "longspan/plan/plan.h"

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/plan/attention_layout.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

std::vector<std::pair<int, std::vector<TokenRange>>> parcels(
    const std::vector<PlannedParcel>& planned) {
  std::vector<std::pair<int, std::vector<TokenRange>>> pairs;
  for (const PlannedParcel& parcel : planned) {
    pairs.emplace_back(parcel.peer, parcel.tokens);
  }
  return pairs;
}

Pass pass_named(const std::string& name) {
  if (name == "forward") return Pass::forward;
  check(name == "backward", "Plan: pass '", name,
        "' is not one of forward, backward");
  return Pass::backward;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Strategy>(m, "Strategy", "How attention runs over the ranks.")
      .def(py::init([](const std::string& name, std::optional<int64_t> teams) {
             const int64_t head_ranks = teams.value_or(Strategy::kFitting);
             check(head_ranks == static_cast<int>(head_ranks),
                   "Strategy: head_ranks is ", head_ranks,
                   "; it must divide the ranks");
             return Strategy::named(name, static_cast<int>(head_ranks));
           }),
           py::arg("name"), py::arg("head_ranks") = py::none())
      .def_static("names",
                  [] {
                    return std::vector<std::string>(Strategy::names().begin(),
                                                    Strategy::names().end());
                  })
      .def_property_readonly(
          "name",
          [](const Strategy& strategy) { return std::string(strategy.name()); })
      .def_property_readonly(
          "head_ranks",
          [](const Strategy& strategy) -> std::optional<int> {
            if (strategy.head_ranks < 1) return std::nullopt;
            return strategy.head_ranks;
          },
          "Ranks of a team; None where the group decides.")
      .def(py::self == py::self)
      .def("__hash__",
           [](const Strategy& strategy) {
             return 31 * static_cast<int>(strategy.transport) +
                    strategy.head_ranks + 1;
           })
      .def("__repr__", [](const Strategy& strategy) {
        const std::string teams =
            strategy.head_ranks > 1 ? join(", head_ranks=", strategy.head_ranks)
                                    : std::string();
        return join("Strategy('", strategy.name(), "'", teams, ")");
      });
  py::class_<PlanStep>(m, "PlanStep",
                       "One block of keys against all queries of a rank.")
      .def_readonly("keys", &PlanStep::keys)
      .def_readonly("pairs", &PlanStep::pairs)
      .def_property_readonly(
          "sends", [](const PlanStep& step) { return parcels(step.sends); })
      .def_property_readonly(
          "arrivals",
          [](const PlanStep& step) { return parcels(step.arrivals); })
      .def_property_readonly(
          "returns", [](const PlanStep& step) { return parcels(step.returns); })
      .def_property_readonly("homecomings", [](const PlanStep& step) {
        return parcels(step.homecomings);
      });
  py::class_<Plan>(m, "Plan",
                   "What one rank does for one strategy, ownership and mask: "
                   "steps, tiles, transfers and bytes.")
      .def_static(
          "of",
          [](const Ownership& ownership, std::vector<Mask> masks,
             const Strategy& strategy, int rank, int64_t key_heads,
             int64_t rows) {
            const auto layout =
                AttentionLayout::of(ownership, std::move(masks));
            return Plan::of(layout, strategy.over(ownership.ranks(), key_heads),
                            rank, rows);
          },
          py::arg("ownership"), py::arg("masks"), py::arg("strategy"),
          py::arg("rank"), py::arg("key_heads") = 1, py::arg("rows") = 1)
      .def_property_readonly("strategy",
                             [](const Plan& plan) { return plan.strategy(); })
      .def_property_readonly("rank", &Plan::rank)
      .def_property_readonly("ranks", &Plan::ranks)
      .def_property_readonly("steps", &Plan::steps)
      .def_property_readonly("hops", &Plan::hops)
      .def(
          "sent_bytes",
          [](const Plan& plan, const std::string& pass, int64_t heads,
             int64_t key_heads, int64_t head_dim,
             std::optional<int64_t> value_dim, int64_t bytes_per_element) {
            return plan.sent_bytes({.heads = heads,
                                    .key_heads = key_heads,
                                    .head_dim = head_dim,
                                    .value_dim = value_dim.value_or(head_dim),
                                    .bytes_per_element = bytes_per_element},
                                   pass_named(pass));
          },
          py::arg("pass"), py::kw_only(), py::arg("heads"),
          py::arg("key_heads"), py::arg("head_dim"),
          py::arg("value_dim") = py::none(), py::arg("bytes_per_element") = 2)
      .def("__repr__", &Plan::to_string);
}

}  // namespace longspan::python
