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

constexpr const char* kHeads = "all_to_all_heads";
constexpr const char* kTokens = "all_to_all_tokens";

using TradeOperator = at::Tensor(const at::Tensor&, int64_t, int64_t,
                                 c10::SymIntArrayRef, c10::SymIntArrayRef,
                                 std::string_view);

/// Both directions alike: what is cut along `split` becomes cut along `join`.
struct Axes {
  int64_t split = 0;  // whole before, this rank's part after
  int64_t join = 0;   // this rank's part before, whole after
};

Axes checked_axes(const char* who, const at::Tensor& x, int64_t split,
                  int64_t join, c10::SymIntArrayRef split_sizes,
                  c10::SymIntArrayRef join_sizes, const Group& group) {
  const Axes axes = {checked_axis(who, x, split), checked_axis(who, x, join)};
  const bool heads = who == kHeads;
  check(axes.split != axes.join, who, ": tokens and heads are both axis ",
        axes.split);
  check_sizes(who, "token_sizes", heads ? join_sizes : split_sizes, group);
  check_sizes(who, "head_sizes", heads ? split_sizes : join_sizes, group);
  check_extent(who, x, axes.split, sum_of(split_sizes),
               heads ? "heads of all ranks" : "tokens of all ranks");
  check_extent(who, x, axes.join, size_here(join_sizes, group),
               longspan::join(heads ? "tokens that `token_sizes`"
                                    : "heads that `head_sizes`",
                              " gives rank ", group.rank()));
  return axes;
}

at::Tensor exchange_meta(const char* who, const at::Tensor& x, int64_t split,
                         int64_t join, c10::SymIntArrayRef split_sizes,
                         c10::SymIntArrayRef join_sizes,
                         std::string_view name) {
  const Group group = Group::named(std::string(name));
  const Axes axes =
      checked_axes(who, x, split, join, split_sizes, join_sizes, group);
  auto sizes = resized(x, axes.split, size_here(split_sizes, group));
  sizes[static_cast<std::size_t>(axes.join)] = sum_of(join_sizes);
  return at::empty_symint(sizes, x.options());
}

at::Tensor traded(const char* who, const at::Tensor& x, const Axes& axes,
                  at::IntArrayRef split_sizes, at::IntArrayRef join_sizes,
                  const Group& group) {
  const auto split_firsts = firsts_of(split_sizes);
  const auto join_firsts = firsts_of(join_sizes);
  std::vector<Trader> traders;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    traders.push_back({rank,
                       {split_firsts[r], split_firsts[r + 1]},
                       {join_firsts[r], join_firsts[r + 1]}});
  }
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(axes.split)] =
      split_sizes[static_cast<std::size_t>(group.rank())];
  sizes[static_cast<std::size_t>(axes.join)] = join_firsts.back();
  return carry(
      {.x = x,
       .pieces = trade_pieces(axes.split, axes.join, traders, group.rank()),
       .target_sizes = std::move(sizes)},
      group, {.purpose = who});
}

at::Tensor exchange(const char* who, const at::Tensor& x, int64_t split,
                    int64_t join, at::IntArrayRef split_sizes,
                    at::IntArrayRef join_sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, who, [&](CallScope& call) {
    const Axes axes = checked_axes(who, x, split, join, sym_ints(split_sizes),
                                   sym_ints(join_sizes), group);
    call.begin([&] {
      return linear_facts(x, {axes.split, axes.join},
                          {split_sizes, join_sizes});
    });
    return traded(who, x, axes, split_sizes, join_sizes, group);
  });
}

at::Tensor call(const char* who, const at::Tensor& x, int64_t token_axis,
                int64_t head_axis, c10::SymIntArrayRef token_sizes,
                c10::SymIntArrayRef head_sizes, std::string_view group) {
  const auto find = [](const char* name) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<TradeOperator>();
  };
  static const auto heads = find("longspan::all_to_all_heads");
  static const auto tokens = find("longspan::all_to_all_tokens");
  return (who == kHeads ? heads : tokens)
      .call(x, token_axis, head_axis, token_sizes, head_sizes, group);
}

at::Tensor heads_meta(const at::Tensor& x, int64_t token_axis,
                      int64_t head_axis, c10::SymIntArrayRef token_sizes,
                      c10::SymIntArrayRef head_sizes, std::string_view group) {
  return exchange_meta(kHeads, x, head_axis, token_axis, head_sizes,
                       token_sizes, group);
}

at::Tensor tokens_meta(const at::Tensor& x, int64_t token_axis,
                       int64_t head_axis, c10::SymIntArrayRef token_sizes,
                       c10::SymIntArrayRef head_sizes, std::string_view group) {
  return exchange_meta(kTokens, x, token_axis, head_axis, token_sizes,
                       head_sizes, group);
}

at::Tensor heads(const at::Tensor& x, int64_t token_axis, int64_t head_axis,
                 at::IntArrayRef token_sizes, at::IntArrayRef head_sizes,
                 std::string_view group) {
  return exchange(kHeads, x, head_axis, token_axis, head_sizes, token_sizes,
                  group);
}

at::Tensor tokens(const at::Tensor& x, int64_t token_axis, int64_t head_axis,
                  at::IntArrayRef token_sizes, at::IntArrayRef head_sizes,
                  std::string_view group) {
  return exchange(kTokens, x, token_axis, head_axis, token_sizes, head_sizes,
                  group);
}

at::Tensor autograd(const char* who, const char* adjoint, const at::Tensor& x,
                    int64_t token_axis, int64_t head_axis,
                    c10::SymIntArrayRef token_sizes,
                    c10::SymIntArrayRef head_sizes, std::string_view group) {
  const auto through = [token_axis, head_axis, tokens = token_sizes.vec(),
                        heads = head_sizes.vec(),
                        group = std::string(group)](const char* op) {
    return [=](const at::Tensor& value) {
      return call(op, value, token_axis, head_axis, tokens, heads, group);
    };
  };
  return apply_linear(x, through(who), through(adjoint));
}

at::Tensor heads_autograd(const at::Tensor& x, int64_t token_axis,
                          int64_t head_axis, c10::SymIntArrayRef token_sizes,
                          c10::SymIntArrayRef head_sizes,
                          std::string_view group) {
  return autograd(kHeads, kTokens, x, token_axis, head_axis, token_sizes,
                  head_sizes, group);
}

at::Tensor tokens_autograd(const at::Tensor& x, int64_t token_axis,
                           int64_t head_axis, c10::SymIntArrayRef token_sizes,
                           c10::SymIntArrayRef head_sizes,
                           std::string_view group) {
  return autograd(kTokens, kHeads, x, token_axis, head_axis, token_sizes,
                  head_sizes, group);
}

}  // namespace

at::Tensor all_to_all_heads(const at::Tensor& x, int64_t token_axis,
                            int64_t head_axis, at::IntArrayRef token_sizes,
                            at::IntArrayRef head_sizes, const Group& group) {
  checked_axes(kHeads, x, head_axis, token_axis, sym_ints(head_sizes),
               sym_ints(token_sizes), group);
  if (group.size() == 1) return x;
  return call(kHeads, x, token_axis, head_axis, sym_ints(token_sizes),
              sym_ints(head_sizes), group.name());
}

at::Tensor all_to_all_tokens(const at::Tensor& x, int64_t token_axis,
                             int64_t head_axis, at::IntArrayRef token_sizes,
                             at::IntArrayRef head_sizes, const Group& group) {
  checked_axes(kTokens, x, token_axis, head_axis, sym_ints(token_sizes),
               sym_ints(head_sizes), group);
  if (group.size() == 1) return x;
  return call(kTokens, x, token_axis, head_axis, sym_ints(token_sizes),
              sym_ints(head_sizes), group.name());
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  for (const std::string name : {kHeads, kTokens}) {
    m.def((name + "(Tensor x, int token_axis, int head_axis, "
                  "SymInt[] token_sizes, SymInt[] head_sizes, str group) "
                  "-> Tensor")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
  }
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl(kHeads, heads_meta);
  m.impl(kTokens, tokens_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl(kHeads, heads);
  m.impl(kTokens, tokens);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl(kHeads, heads_autograd);
  m.impl(kTokens, tokens_autograd);
}

}  // namespace longspan
