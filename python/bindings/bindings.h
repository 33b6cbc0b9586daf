#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace longspan::python {

/// One entry a token: more than this is a slip, not an array.
inline constexpr int64_t kMostEntries = int64_t{1} << 31;

/// One for each folder of the library.
void bind_core(pybind11::module_& m);
void bind_draw(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_batch(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_pools(pybind11::module_& m);     // of plan and attention
void bind_selected(pybind11::module_& m);  // of attention

}  // namespace longspan::python
