#pragma once

#include <pybind11/pybind11.h>

#include "longspan/core/detail/check.h"

namespace longspan::python {

/// Makes what pybind11 refuses about the functions and classes of a module
/// ours:
///
/// A call whose arguments do not fit says which argument, what came and what is
/// expected (`mismatch` of longspan/_arguments.py words it), and not which
/// signatures C++ has. Nothing is added to calls that fit.
///
/// An object that was made by __new__ alone has no value yet. pybind11 would
/// hand out memory that nobody wrote; here every use raises.
void name_refusals(pybind11::module_& m);

/// What __setstate__ makes of a pickled tuple; a tuple of anything else is
/// refused by name.
template <class Make>
auto from_state(const char* who, const Make& make) {
  return [=](const pybind11::tuple& state) {
    try {
      return make(state);
    } catch (const pybind11::builtin_exception&) {
      throw std::invalid_argument(
          join(who, ": this is no state that was pickled from one"));
    } catch (const pybind11::error_already_set&) {
      throw std::invalid_argument(
          join(who, ": this is no state that was pickled from one"));
    }
  };
}

}  // namespace longspan::python
