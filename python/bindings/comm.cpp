#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "longspan/comm/agree.h"
#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/launch.h"
#include "longspan/comm/group.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/comm/needed.h"
#include "longspan/core/detail/check.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_comm(py::module_& m) {
  // Torch turns a LostPeer out of an operator, or out of a backward pass, into
  // its own type; so do functions of this module.
  static const py::handle lost_peer =
      py::object(py::module_::import("torch._C").attr("_DistBackendError"))
          .release();
  m.attr("LostPeer") = lost_peer;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const LostPeer& lost) {
      PyErr_SetString(lost_peer.ptr(), lost.what());
    }
  });
  py::register_exception<DifferentFields>(m, "DifferentFields",
                                          PyExc_ValueError);

  py::class_<Group>(m, "Group", "The ranks that hold one sequence together.")
      .def(py::init([](const std::string& name) {
             // Not as a call guard: pybind11 notes the instance down after
             // this, and needs the lock for it.
             const py::gil_scoped_release release;
             return Group::named(name);
           }),
           py::arg("name") = "")
      .def("rank", &Group::rank)
      .def("size", &Group::size)
      .def_property_readonly("name", &Group::name)
      .def_property_readonly(
          "timeout",
          [](const Group& group) {
            return std::chrono::duration<double>(group.timeout()).count();
          },
          "Seconds that a wait may last.")
      .def_property_readonly(
          "sent_bytes", &Group::sent_bytes,
          "Bytes that this process sent to other ranks through this group.")
      .def("__repr__", [](const Group& group) {
        return join("Group(", group.to_string(), ")");
      });

  m.def(
      "launch_from",
      [](const std::map<std::string, std::string>& variables)
          -> std::optional<std::tuple<int, int, std::string, int>> {
        const auto launch = launch_from([&](const std::string& name) {
          const auto it = variables.find(name);
          return it == variables.end() || it->second.empty()
                     ? std::nullopt
                     : std::optional(it->second);
        });
        if (!launch) return std::nullopt;
        return std::tuple(launch->rank, launch->size, launch->address,
                          launch->port);
      },
      py::arg("variables"));

  m.def("agree", &agree, py::arg("group"), py::arg("fields"), NoGil());
  m.def(
      "interrupt",
      [](const std::string& name, const std::string& why) {
        interrupt(Group::named(name), why);
      },
      py::arg("name"), py::arg("why"), NoGil());

  m.def("hash_of", py::overload_cast<const at::Tensor&>(&hash_of),
        py::arg("tensor"), NoGil());
  m.def("hash_of", py::overload_cast<const Packing&>(&hash_of),
        py::arg("packing"));
  m.def("hash_of", py::overload_cast<const Ownership&>(&hash_of),
        py::arg("ownership"));
  m.def(
      "hash_of",
      [](const py::bytes& bytes) {
        const std::string_view view = bytes;
        return hash_bytes(view.data(), view.size());
      },
      py::arg("bytes"));

  m.def(
      "received_ranges",
      [](const at::Tensor& table, const Ownership& ownership, int rank) {
        check(!table.is_nested() && table.layout() == at::kStrided,
              "received_ranges: `table` is no dense tensor; expected that of ",
              "needed_table");
        return received_ranges(table, ownership, rank);
      },
      py::arg("table"), py::arg("ownership"), py::arg("rank"));
  m.def("received_tokens", &received_tokens, py::arg("table"), py::arg("rank"));
}

}  // namespace longspan::python
