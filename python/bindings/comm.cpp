#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "longspan/comm/agree.h"
#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/launch.h"
#include "longspan/comm/detail/watch.h"
#include "longspan/comm/disagreement.h"
#include "longspan/comm/group.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/comm/needed.h"
#include "longspan/core/detail/check.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

/// Waits are on the caller's thread: Ctrl-C must end them.
void raise_signals() {
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

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
    } catch (const Disagreement& difference) {
      PyErr_SetString(PyExc_ValueError, difference.what_without_backtrace());
    }
  });
  set_wait_hook(raise_signals);
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
      .def(
          "_set_timeout",
          [](const Group& group, double seconds) {
            check(seconds > 0 && seconds < 1e9, "Group: timeout is ", seconds,
                  " s; expected a number of seconds above zero");
            group.set_timeout(std::chrono::milliseconds(
                std::max<int64_t>(static_cast<int64_t>(seconds * 1000), 1)));
          },
          py::arg("seconds"))
      .def_property_readonly(
          "sent_bytes", &Group::sent_bytes,
          "Bytes that this process sent to other ranks through this group.")
      .def_property_readonly(
          "waited",
          [](const Group& group) {
            return std::chrono::duration<double>(group.waited()).count();
          },
          "Seconds that this process waited for other ranks of this group.")
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

  m.def("name_layer", &name_layer, py::arg("name"));
  m.def("calls_of", &calls_of, py::arg("group"));
  m.def("raised_last", &raised_last, py::arg("group"));
  m.def(
      "tell_raised",
      [](const std::string& name, const std::string& what) {
        tell_raised(Group::named(name), what);
      },
      py::arg("group"), py::arg("what"), NoGil());
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
