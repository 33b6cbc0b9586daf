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
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    check(overflow == 0, who, ": ", pybind11::str(value).cast<std::string>(),
          " does not fit 64 bits");
    return number;
  }
  if (pybind11::isinstance<pybind11::float_>(value))
    return value.cast<double>();
  throw std::invalid_argument(
      join(who, ": `fill` is ",
           pybind11::str(pybind11::type::handle_of(value).attr("__name__"))
               .cast<std::string>(),
           "; expected a number"));
}

}  // namespace longspan::python
