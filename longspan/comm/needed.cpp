#include "longspan/comm/needed.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <span>
#include <utility>

#include "longspan/comm/agree.h"
#include "longspan/comm/collectives.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/comm/detail/linear.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/core/tile.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr const char* kSend = "exchange_needed";
constexpr const char* kReturn = "return_needed";

struct Row {
  int64_t from = 0;
  int64_t to = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

/// The rows of a table; checks what does not depend on a group.
class Rows {
 public:
  Rows(const char* who, const at::Tensor& table) {
    check(table.defined() && table.dim() == 2 && table.size(1) == 4 &&
              table.scalar_type() == at::kLong,
          who, ": `sends` is ", describe(table),
          "; expected int64 [n, 4] = (from, to, begin, length)");
    check(table.device().is_cpu(), who, ": `sends` is on ", table.device(),
          "; it is plain numbers, keep it on the CPU");
    table_ = table.contiguous();
    static_assert(sizeof(Row) == 4 * sizeof(int64_t));
    view_ = {reinterpret_cast<const Row*>(table_.const_data_ptr<int64_t>()),
             static_cast<std::size_t>(table_.size(0))};
  }
  auto begin() const { return view_.begin(); }
  auto end() const { return view_.end(); }
  std::size_t size() const { return view_.size(); }

  void check_ranks(const char* who, int ranks) const {
    for (const Row& row : view_) {
      check(row.from >= 0 && row.from < ranks && row.to >= 0 &&
                row.to < ranks && row.begin >= 0 && row.length >= 0,
            who, ": `sends` has the row (", row.from, ", ", row.to, ", ",
            row.begin, ", ", row.length, ") in a group of ", ranks);
    }
  }

 private:
  at::Tensor table_;
  std::span<const Row> view_;
};

struct Pieces {
  std::vector<Piece> pieces;  // from local tokens to received tokens
  int64_t received = 0;
  int64_t held = 0;  // local tokens that the table mentions
};

/// The pieces of one rank, ordered by sender and then by row.
Pieces pieces_for(const char* who, const Rows& rows, int64_t axis,
                  const Group& group) {
  rows.check_ranks(who, group.size());
  const int64_t me = group.rank();
  std::vector<Row> mine;
  for (const Row& row : rows) {
    if (row.length > 0 && (row.from == me || row.to == me)) mine.push_back(row);
  }
  std::stable_sort(mine.begin(), mine.end(),
                   [](const Row& a, const Row& b) { return a.from < b.from; });
  Pieces plan;
  for (const Row& row : mine) {
    // Places on other ranks are theirs to know.
    Part target = {axis, 0, row.length};
    if (row.to == me) {
      target.begin = std::exchange(plan.received, plan.received + row.length);
    }
    if (row.from == me) plan.held = std::max(plan.held, row.begin + row.length);
    plan.pieces.push_back({static_cast<int>(row.from),
                           static_cast<int>(row.to),
                           {axis, row.begin, row.length},
                           target});
  }
  return plan;
}

using NeededOperator = at::Tensor(const at::Tensor&, int64_t, const at::Tensor&,
                                  c10::SymInt, std::string_view);

at::Tensor call(const char* who, const at::Tensor& x, int64_t axis,
                const at::Tensor& sends, c10::SymInt tokens,
                std::string_view group) {
  const auto find = [](const char* name) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<NeededOperator>();
  };
  static const auto send = find("longspan::exchange_needed");
  static const auto give_back = find("longspan::return_needed");
  return (who == kSend ? send : give_back)
      .call(x, axis, sends, std::move(tokens), group);
}

at::Tensor meta(const char* who, const at::Tensor& x, int64_t axis,
                const at::Tensor& sends, c10::SymInt tokens) {
  axis = checked_axis(who, x, axis);
  check(sends.dim() == 2 && sends.sym_size(1) == 4 &&
            sends.scalar_type() == at::kLong,
        who, ": `sends` is ", describe(sends),
        "; expected int64 [n, 4] = (from, to, begin, length)");
  return at::empty_symint(resized(x, axis, std::move(tokens)), x.options());
}

at::Tensor send_meta(const at::Tensor& x, int64_t axis, const at::Tensor& sends,
                     c10::SymInt received, std::string_view /*group*/) {
  return meta(kSend, x, axis, sends, std::move(received));
}

at::Tensor return_meta(const at::Tensor& x, int64_t axis,
                       const at::Tensor& sends, c10::SymInt tokens,
                       std::string_view /*group*/) {
  return meta(kReturn, x, axis, sends, std::move(tokens));
}

std::vector<int64_t> with_tokens(const at::Tensor& x, int64_t axis,
                                 int64_t tokens) {
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(axis)] = tokens;
  return sizes;
}

std::string table_facts(const at::Tensor& x, int64_t axis,
                        const at::Tensor& sends) {
  return join(linear_facts(x, {axis}, {}), "; table ", hash_of(sends));
}

at::Tensor send_here(const at::Tensor& x, int64_t axis, const at::Tensor& sends,
                     int64_t received, std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kSend, [&](CallScope& call) {
    const int64_t along = checked_axis(kSend, x, axis);
    const Pieces plan = pieces_for(kSend, Rows(kSend, sends), along, group);
    check(plan.held <= x.size(along), kSend, ": `sends` names token ",
          plan.held - 1, " of rank ", group.rank(), ", but axis ", along,
          " of ", describe(x), " ends before it");
    check(received == plan.received, kSend, ": `received` is ", received,
          "; the rows of `sends` give rank ", group.rank(), " ", plan.received,
          " tokens");
    call.begin([&] { return table_facts(x, along, sends); });
    return carry({.x = x,
                  .pieces = plan.pieces,
                  .target_sizes = with_tokens(x, along, plan.received)},
                 group, {.purpose = kSend});
  });
}

at::Tensor return_here(const at::Tensor& x, int64_t axis,
                       const at::Tensor& sends, int64_t tokens,
                       std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kReturn, [&](CallScope& call) {
    const int64_t along = checked_axis(kReturn, x, axis);
    const Pieces plan = pieces_for(kReturn, Rows(kReturn, sends), along, group);
    check_extent(kReturn, x, along, plan.received,
                 join("tokens that `sends` gives rank ", group.rank()));
    check(plan.held <= tokens, kReturn, ": `sends` names token ", plan.held - 1,
          " of rank ", group.rank(), ", which has ", tokens);
    call.begin([&] { return table_facts(x, along, sends); });
    return carry({.x = x,
                  .pieces = reversed(plan.pieces),
                  .target_sizes = with_tokens(x, along, tokens),
                  .meeting = Meeting::add},
                 group, {.purpose = kReturn});
  });
}

at::Tensor send_autograd(const at::Tensor& x, int64_t axis,
                         const at::Tensor& sends, c10::SymInt received,
                         std::string_view name) {
  axis = checked_axis(kSend, x, axis);
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call(kSend, value, axis, sends, received, name);
      },
      [axis, sends, tokens = x.sym_size(axis),
       name = std::string(name)](const at::Tensor& grad) {
        return call(kReturn, grad, axis, sends, tokens, name);
      });
}

at::Tensor return_autograd(const at::Tensor& x, int64_t axis,
                           const at::Tensor& sends, c10::SymInt tokens,
                           std::string_view name) {
  axis = checked_axis(kReturn, x, axis);
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call(kReturn, value, axis, sends, tokens, name);
      },
      [axis, sends, received = x.sym_size(axis),
       name = std::string(name)](const at::Tensor& grad) {
        return call(kSend, grad, axis, sends, received, name);
      });
}

/// Whether one rank would get its own tokens as they are.
bool is_identity(const Rows& rows, int64_t tokens, const Group& group) {
  return group.size() == 1 && rows.size() == 1 && rows.begin()->begin == 0 &&
         rows.begin()->length == tokens;
}

}  // namespace

at::Tensor exchange_needed(const at::Tensor& x, int64_t axis,
                           const at::Tensor& sends, const Group& group) {
  axis = checked_axis(kSend, x, axis);
  const Rows rows(kSend, sends);
  rows.check_ranks(kSend, group.size());
  if (is_identity(rows, x.size(axis), group)) return x;
  return call(kSend, x, axis, sends, received_tokens(sends, group.rank()),
              group.name());
}

at::Tensor return_needed(const at::Tensor& x, int64_t axis,
                         const at::Tensor& sends, int64_t tokens,
                         const Group& group) {
  axis = checked_axis(kReturn, x, axis);
  const Rows rows(kReturn, sends);
  rows.check_ranks(kReturn, group.size());
  if (is_identity(rows, tokens, group)) return x;
  return call(kReturn, x, axis, sends, tokens, group.name());
}

int64_t received_tokens(const at::Tensor& table, int rank) {
  int64_t tokens = 0;
  for (const Row& row : Rows("received_tokens", table)) {
    if (row.to == rank) tokens += row.length;
  }
  return tokens;
}

at::Tensor needed_table(const Mask& mask, const Ownership& ownership) {
  check(mask.ratio() == 0,
        "needed_table: the mask is compressed, so its keys are no tokens; "
        "gather the compressed keys instead");
  check(mask.queries() == ownership.tokens(), "needed_table: the mask has ",
        mask.queries(), " tokens, the ownership ", ownership.tokens());
  std::vector<Row> rows;
  for (int to = 0; to < ownership.ranks(); ++to) {
    std::vector<Row> here;
    for (const TokenRange range : needed_keys(mask, ownership.ranges_of(to))) {
      for (int64_t token = range.begin; token < range.end;) {
        const auto [owner, held] = ownership.holding(token);
        const int64_t end = std::min(range.end, held.end);
        here.push_back({owner, to, ownership.local_of(token), end - token});
        token = end;
      }
    }
    std::stable_sort(here.begin(), here.end(), [](const Row& a, const Row& b) {
      return std::pair(a.from, a.begin) < std::pair(b.from, b.begin);
    });
    for (const Row& row : here) {
      Row* const last = rows.empty() ? nullptr : &rows.back();
      if (last != nullptr && last->to == to && last->from == row.from &&
          last->begin + last->length == row.begin) {
        last->length += row.length;
      } else {
        rows.push_back(row);
      }
    }
  }
  at::Tensor table =
      at::empty({std::ssize(rows), 4}, at::TensorOptions(at::kLong));
  std::copy(rows.begin(), rows.end(),
            reinterpret_cast<Row*>(table.mutable_data_ptr<int64_t>()));
  return table;
}

std::vector<TokenRange> received_ranges(const at::Tensor& table,
                                        const Ownership& ownership, int rank) {
  const Rows rows("received_ranges", table);
  rows.check_ranks("received_ranges", ownership.ranks());
  std::vector<Row> mine;
  for (const Row& row : rows) {
    if (row.to == rank && row.length > 0) mine.push_back(row);
  }
  std::stable_sort(mine.begin(), mine.end(),
                   [](const Row& a, const Row& b) { return a.from < b.from; });
  std::vector<TokenRange> ranges;
  for (const Row& row : mine) {
    for (int64_t local = row.begin; local < row.begin + row.length;) {
      const int64_t token =
          ownership.global_of(static_cast<int>(row.from), local);
      const int64_t end = std::min(token + row.begin + row.length - local,
                                   ownership.holding(token).range.end);
      ranges.push_back({token, end});
      local += end - token;
    }
  }
  return ranges;
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "exchange_needed(Tensor x, int axis, Tensor sends, SymInt received, "
      "str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "return_needed(Tensor x, int axis, Tensor sends, SymInt tokens, "
      "str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl(kSend, send_meta);
  m.impl(kReturn, return_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl(kSend, send_here);
  m.impl(kReturn, return_here);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl(kSend, send_autograd);
  m.impl(kReturn, return_autograd);
}

}  // namespace longspan
