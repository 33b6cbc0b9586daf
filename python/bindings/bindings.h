#pragma once

#include <pybind11/pybind11.h>

namespace longspan::python {

/// One for each folder of the library.
void bind_core(pybind11::module_& m);
void bind_draw(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_batch(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_selected(pybind11::module_& m);  // of attention

}  // namespace longspan::python
