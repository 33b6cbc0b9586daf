#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "longspan/comm/collectives.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/comm/detail/linear.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

constexpr const char* kGather = "all_gather_tokens";
constexpr const char* kScatter = "reduce_scatter_tokens";

using GatherOperator = at::Tensor(const at::Tensor&, int64_t,
                                  c10::SymIntArrayRef, std::string_view);

at::Tensor call_gather(const at::Tensor& x, int64_t axis,
                       c10::SymIntArrayRef sizes, const std::string& group) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("longspan::all_gather_tokens", "")
          .typed<GatherOperator>();
  return op.call(x, axis, sizes, group);
}

at::Tensor call_scatter(const at::Tensor& x, int64_t axis,
                        c10::SymIntArrayRef sizes, const std::string& group) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("longspan::reduce_scatter_tokens", "")
          .typed<GatherOperator>();
  return op.call(x, axis, sizes, group);
}

int64_t check_gather(const at::Tensor& x, int64_t axis,
                     c10::SymIntArrayRef sizes, const Group& group) {
  axis = checked_axis(kGather, x, axis);
  check_sizes(kGather, "sizes", sizes, group);
  check_extent(kGather, x, axis, size_here(sizes, group),
               join("tokens that `sizes` gives rank ", group.rank()));
  return axis;
}

int64_t check_scatter(const at::Tensor& x, int64_t axis,
                      c10::SymIntArrayRef sizes, const Group& group) {
  axis = checked_axis(kScatter, x, axis);
  check_sizes(kScatter, "sizes", sizes, group);
  check_extent(kScatter, x, axis, sum_of(sizes), "tokens of all ranks");
  return axis;
}

at::Tensor gather_meta(const at::Tensor& x, int64_t axis,
                       c10::SymIntArrayRef sizes, std::string_view name) {
  axis = check_gather(x, axis, sizes, Group::named(std::string(name)));
  return at::empty_symint(resized(x, axis, sum_of(sizes)), x.options());
}

at::Tensor scatter_meta(const at::Tensor& x, int64_t axis,
                        c10::SymIntArrayRef sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  axis = check_scatter(x, axis, sizes, group);
  return at::empty_symint(resized(x, axis, size_here(sizes, group)),
                          x.options());
}

at::Tensor gather(const at::Tensor& x, int64_t axis, at::IntArrayRef sizes,
                  std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kGather, [&](CallScope& call) {
    const int64_t along = check_gather(x, axis, sym_ints(sizes), group);
    call.begin([&] { return linear_facts(x, {along}, {sizes}); });
    return gather_tokens(x, along, sizes, group, {.purpose = kGather});
  });
}

at::Tensor scatter(const at::Tensor& x, int64_t axis, at::IntArrayRef sizes,
                   std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kScatter, [&](CallScope& call) {
    const int64_t along = check_scatter(x, axis, sym_ints(sizes), group);
    call.begin([&] { return linear_facts(x, {along}, {sizes}); });
    return scatter_tokens(x, along, sizes, group, {.purpose = kScatter});
  });
}

at::Tensor gather_autograd(const at::Tensor& x, int64_t axis,
                           c10::SymIntArrayRef sizes, std::string_view name) {
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call_gather(value, axis, sizes, std::string(name));
      },
      [axis, sizes = sizes.vec(),
       name = std::string(name)](const at::Tensor& grad) {
        return call_scatter(grad, axis, sizes, name);
      });
}

at::Tensor scatter_autograd(const at::Tensor& x, int64_t axis,
                            c10::SymIntArrayRef sizes, std::string_view name) {
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call_scatter(value, axis, sizes, std::string(name));
      },
      [axis, sizes = sizes.vec(),
       name = std::string(name)](const at::Tensor& grad) {
        return call_gather(grad, axis, sizes, name);
      });
}

}  // namespace

at::Tensor all_gather_tokens(const at::Tensor& x, int64_t axis,
                             at::IntArrayRef sizes, const Group& group) {
  check_gather(x, axis, sym_ints(sizes), group);
  if (group.size() == 1) return x;
  return call_gather(x, axis, sym_ints(sizes), group.name());
}

at::Tensor reduce_scatter_tokens(const at::Tensor& x, int64_t axis,
                                 at::IntArrayRef sizes, const Group& group) {
  check_scatter(x, axis, sym_ints(sizes), group);
  if (group.size() == 1) return x;
  return call_scatter(x, axis, sym_ints(sizes), group.name());
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  for (const std::string name : {kGather, kScatter}) {
    m.def((name + "(Tensor x, int axis, SymInt[] sizes, str group) -> Tensor")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
  }
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl(kGather, gather_meta);
  m.impl(kScatter, scatter_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl(kGather, gather);
  m.impl(kScatter, scatter);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl(kGather, gather_autograd);
  m.impl(kScatter, scatter_autograd);
}

}  // namespace longspan
