#pragma once

#include <ATen/core/Scalar.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "longspan/core/detail/check.h"

namespace longspan::python {

/// A Python number; bool before int, because True is an int too.
inline at::Scalar scalar_of(const pybind11::handle& value, const char* who) {
  if (pybind11::isinstance<pybind11::bool_>(value)) return value.cast<bool>();
  if (pybind11::isinstance<pybind11::int_>(value)) {
    const int64_t number = PyLong_AsLongLong(value.ptr());
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return number;
  }
  if (pybind11::isinstance<pybind11::float_>(value))
    return value.cast<double>();
  throw std::invalid_argument(
      join(who, ": expected a number, got ",
           pybind11::str(pybind11::type::handle_of(value).attr("__name__"))
               .cast<std::string>()));
}

}  // namespace longspan::python
