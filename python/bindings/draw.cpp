#include "longspan/draw/draw.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/plan/attention_layout.h"
#include "python/bindings/bindings.h"

namespace py = pybind11;

namespace longspan::python {

namespace {

std::string text_of(const Picture& picture, int width, bool ascii, bool color) {
  return to_text(picture, {.width = width,
                           .glyphs = ascii ? Glyphs::ascii : Glyphs::unicode,
                           .ink = color ? Ink::ansi : Ink::plain});
}

/// Values show themselves in a notebook as one rank would hold them.
Ownership one_rank(const Packing& packing) {
  return Ownership::contiguous(packing.tokens(), 1);
}

}  // namespace

void bind_draw(py::module_& m) {
  py::class_<Picture>(m, "Picture",
                      "A drawing; shows itself as SVG in a notebook and as "
                      "text when printed.")
      .def("to_svg", &to_svg)
      .def("to_text", &text_of, py::kw_only(), py::arg("width") = 80,
           py::arg("ascii") = false, py::arg("color") = false)
      .def("_repr_svg_", &to_svg)
      .def("__repr__",
           [](const Picture& picture) {
             const auto panels = std::ssize(panels_of(picture));
             return join("Picture(\"", picture.title, "\", ", panels,
                         panels == 1 ? " panel)" : " panels)");
           })
      .def("__str__", [](const Picture& picture) {
        return text_of(picture, 80, false, false);
      });
  const DrawOptions usual;
  m.def(
      "draw_ownership",
      [=](const Ownership& ownership, const Packing& packing) {
        return draw_ownership(ownership, packing, usual);
      },
      py::arg("ownership"), py::arg("packing"));
  m.def(
      "draw_all",
      [=](const Mask& mask, const Ownership& ownership) {
        return draw(mask, ownership, usual);
      },
      py::arg("mask"), py::arg("ownership"));
  m.def(
      "draw_comparison",
      [=](const Mask& mask, const Ownership& left, const Ownership& right) {
        return draw_comparison(mask, left, right, usual);
      },
      py::arg("mask"), py::arg("left"), py::arg("right"));
  m.def(
      "draw_plan",
      [=](const Ownership& ownership, std::vector<Mask> masks,
          const Strategy& strategy, int64_t heads, int64_t key_heads,
          int64_t head_dim, int64_t value_dim, int64_t bytes_per_element) {
        return draw_plan(AttentionLayout::of(ownership, std::move(masks)),
                         strategy,
                         {.heads = heads,
                          .key_heads = key_heads,
                          .head_dim = head_dim,
                          .value_dim = value_dim,
                          .bytes_per_element = bytes_per_element},
                         usual);
      },
      py::arg("ownership"), py::arg("masks"), py::arg("strategy"),
      py::arg("heads"), py::arg("key_heads"), py::arg("head_dim"),
      py::arg("value_dim"), py::arg("bytes_per_element"));

  m.def(
      "draw_states",
      [=](const Ownership& ownership, std::vector<Mask> masks, int64_t rows,
          int64_t row_bytes, int64_t transition_bytes, int64_t state_bytes,
          const std::string& way) {
        return draw_states(AttentionLayout::of(ownership, std::move(masks)),
                           {.rows = rows,
                            .row_bytes = row_bytes,
                            .transition_bytes = transition_bytes,
                            .state_bytes = state_bytes,
                            .way = state_way_named(way)},
                           usual);
      },
      py::arg("ownership"), py::arg("masks"), py::arg("rows"),
      py::arg("row_bytes"), py::arg("transition_bytes"), py::arg("state_bytes"),
      py::arg("way"));

  const auto add = [&](const char* type, const py::cpp_function& method) {
    m.attr(type).attr("_repr_svg_") = method;
  };
  add("Packing", py::cpp_function(
                     [=](const Packing& packing) {
                       return to_svg(draw_packing(packing, usual));
                     },
                     py::name("_repr_svg_"), py::is_method(m.attr("Packing"))));
  add("Plan",
      py::cpp_function(
          [=](const Plan& plan) { return to_svg(draw_plan_of(plan, usual)); },
          py::name("_repr_svg_"), py::is_method(m.attr("Plan"))));
  add("Ownership",
      py::cpp_function(
          [=](const Ownership& ownership) {
            return to_svg(draw_ownership(
                ownership, Packing::single(ownership.tokens()), usual));
          },
          py::name("_repr_svg_"), py::is_method(m.attr("Ownership"))));
  add("Mask",
      py::cpp_function(
          [=](const Mask& mask) {
            return to_svg(draw_mask(mask, one_rank(mask.packing()), usual));
          },
          py::name("_repr_svg_"), py::is_method(m.attr("Mask"))));
}

}  // namespace longspan::python
