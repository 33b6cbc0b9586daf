#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <type_traits>

#include "longspan/attention/detail/selected_call.h"
#include "longspan/comm/detail/call.h"
#include "longspan/core/detail/check.h"

namespace longspan::selected {

/// One argument of an operator in the text of a call; tensors without their
/// token axis. Strings are left out: a group's name may differ between ranks.
template <class T>
void add_fact(std::string& text, const T& argument, int64_t token_axis) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    text += "; " + facts_of(argument, {token_axis});
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    text += "; " + (argument ? facts_of(*argument, {token_axis}) : "none");
  } else if constexpr (std::is_same_v<T, double>) {
    text += "; ";
    add_to(text, argument);
  } else if constexpr (!std::is_same_v<T, std::string>) {
    text += join("; ", argument);
  }
}

/// Owners and masks of a layout in words, with a number that stands for all of
/// it.
std::string layout_facts(const char* who, const at::Tensor& layout,
                         const Group& group);

/// What `together` of an operator does whose arguments are those of a layer on
/// this rank's tokens, q the first of them: runs it as one call of the group.
template <class Op, class Run>
auto as_call_of(const Op& op, const at::Tensor& q, const Where& where,
                const Run& run) {
  if (!where.layout || where.group.empty()) return run();
  static const std::string name =
      std::string(Op::kSchema).substr(0, std::string(Op::kSchema).find('('));
  const Group group = Group::named(where.group);
  return as_call(group, name.c_str(), [&](CallScope& call) {
    call.begin([&] {
      std::string text = layout_facts(name.c_str(), *where.layout, group);
      text += "; " + where.fetch;
      std::apply(
          [&](const auto&... argument) {
            (add_fact(text, argument, q.dim() == 4 ? 1 : 0), ...);
          },
          Op::fields(op));
      return text + gradient_facts();
    });
    return run();
  });
}

}  // namespace longspan::selected
