#include "python/bindings/bindings.h"
#include "python/bindings/refusals.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Longspan's C++ values and functions.";
  m.attr("__version__") = LONGSPAN_VERSION;
  longspan::python::bind_core(m);
  longspan::python::bind_plan(m);
  longspan::python::bind_draw(m);
  longspan::python::bind_batch(m);
  longspan::python::bind_comm(m);
  longspan::python::bind_attention(m);
  longspan::python::bind_pools(m);
  longspan::python::bind_selected(m);
  longspan::python::name_refusals(m);
}
