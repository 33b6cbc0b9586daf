#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "longspan/comm/collectives.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/comm/detail/linear.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

constexpr const char* kRotate = "rotate";
constexpr const char* kRoll = "roll";

using RotateOperator = at::Tensor(const at::Tensor&, int64_t, int64_t,
                                  c10::SymIntArrayRef, std::string_view);

int64_t modulo(int64_t value, int64_t modulus) {
  const int64_t rest = value % modulus;
  return rest < 0 ? rest + modulus : rest;
}

int64_t checked(const char* who, const at::Tensor& x, int64_t axis,
                c10::SymIntArrayRef sizes, const Group& group) {
  axis = checked_axis(who, x, axis);
  check_sizes(who, "sizes", sizes, group);
  check_extent(who, x, axis, size_here(sizes, group),
               join("tokens that `sizes` gives rank ", group.rank()));
  return axis;
}

/// The rank whose tensor arrives here.
std::size_t rotate_source(int64_t hops, const Group& group) {
  return static_cast<std::size_t>(
      modulo(group.rank() - hops % group.size(), group.size()));
}

at::Tensor call(const char* who, const at::Tensor& x, int64_t first,
                int64_t second, c10::SymIntArrayRef sizes,
                std::string_view group) {
  const auto find = [](const char* name) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<RotateOperator>();
  };
  static const auto rotate = find("longspan::rotate");
  static const auto roll = find("longspan::roll");
  return (who == kRotate ? rotate : roll).call(x, first, second, sizes, group);
}

at::Tensor rotate_meta(const at::Tensor& x, int64_t hops, int64_t axis,
                       c10::SymIntArrayRef sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  axis = checked(kRotate, x, axis, sizes, group);
  return at::empty_symint(resized(x, axis, sizes[rotate_source(hops, group)]),
                          x.options());
}

at::Tensor rotated(const at::Tensor& x, int64_t hops, int64_t axis,
                   at::IntArrayRef sizes, const Group& group) {
  const int me = group.rank();
  const auto source = rotate_source(hops, group);
  const auto target = rotate_source(-(hops % group.size()), group);
  const auto piece = [&](std::size_t from, std::size_t to) {
    const Part whole = {axis, 0, sizes[from]};
    return Piece{static_cast<int>(from), static_cast<int>(to), whole, whole};
  };
  const auto here = static_cast<std::size_t>(me);
  std::vector<Piece> pieces = {piece(source, here)};
  if (source != here) pieces.push_back(piece(here, target));
  auto target_sizes = x.sizes().vec();
  target_sizes[static_cast<std::size_t>(axis)] = sizes[source];
  return carry({.x = x,
                .pieces = std::move(pieces),
                .target_sizes = std::move(target_sizes)},
               group, {.purpose = kRotate});
}

at::Tensor rotate_here(const at::Tensor& x, int64_t hops, int64_t axis,
                       at::IntArrayRef sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kRotate, [&](CallScope& call) {
    const int64_t along = checked(kRotate, x, axis, sym_ints(sizes), group);
    call.begin([&] {
      return join(linear_facts(x, {along}, {sizes}), "; hops ",
                  modulo(hops, group.size()));
    });
    return rotated(x, hops, along, sizes, group);
  });
}

at::Tensor rotate_autograd(const at::Tensor& x, int64_t hops, int64_t axis,
                           c10::SymIntArrayRef sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  checked(kRotate, x, axis, sizes, group);
  hops %= group.size();
  // After the way there, rank r holds what rank r - hops had.
  std::vector<c10::SymInt> back = sizes.vec();
  for (int rank = 0; rank < group.size(); ++rank) {
    back[static_cast<std::size_t>(modulo(rank + hops, group.size()))] =
        sizes[static_cast<std::size_t>(rank)];
  }
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call(kRotate, value, hops, axis, sizes, name);
      },
      [=, name = std::string(name)](const at::Tensor& grad) {
        return call(kRotate, grad, -hops, axis, back, name);
      });
}

at::Tensor roll_meta(const at::Tensor& x, int64_t axis, int64_t /*shift*/,
                     c10::SymIntArrayRef sizes, std::string_view name) {
  checked(kRoll, x, axis, sizes, Group::named(std::string(name)));
  return at::empty_symint(x.sym_sizes(), x.options());
}

/// The shards that a rank's run falls on after the shift, in stream order.
void add_rolled(int from, int64_t axis, int64_t shift, at::IntArrayRef sizes,
                const std::vector<int64_t>& firsts, int me,
                std::vector<Piece>& pieces) {
  const int64_t total = firsts.back();
  const int64_t size = sizes[static_cast<std::size_t>(from)];
  const int64_t first = firsts[static_cast<std::size_t>(from)];
  int64_t done = 0;
  while (done < size) {
    const int64_t token = modulo(first + done + shift, total);
    // The last shard that begins at or before the token; empty ones before it
    // begin there too.
    const auto after = std::upper_bound(firsts.begin(), firsts.end(), token);
    const int to = static_cast<int>(after - firsts.begin()) - 1;
    const int64_t length = std::min(size - done, *after - token);
    if (from == me || to == me) {
      const int64_t begin = token - firsts[static_cast<std::size_t>(to)];
      pieces.push_back({from, to, {axis, done, length}, {axis, begin, length}});
    }
    done += length;
  }
}

at::Tensor roll_here(const at::Tensor& x, int64_t axis, int64_t shift,
                     at::IntArrayRef sizes, std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kRoll, [&](CallScope& call) {
    const int64_t along = checked(kRoll, x, axis, sym_ints(sizes), group);
    call.begin([&] {
      return join(linear_facts(x, {along}, {sizes}), "; shift ", shift);
    });
    const auto firsts = firsts_of(sizes);
    std::vector<Piece> pieces;
    if (firsts.back() > 0) {
      const int64_t by = modulo(shift, firsts.back());
      for (int from = 0; from < group.size(); ++from) {
        add_rolled(from, along, by, sizes, firsts, group.rank(), pieces);
      }
    }
    return carry(
        {.x = x, .pieces = std::move(pieces), .target_sizes = x.sizes().vec()},
        group, {.purpose = kRoll});
  });
}

at::Tensor roll_autograd(const at::Tensor& x, int64_t axis, int64_t shift,
                         c10::SymIntArrayRef sizes, std::string_view name) {
  return apply_linear(
      x,
      [=](const at::Tensor& value) {
        return call(kRoll, value, axis, shift, sizes, name);
      },
      [axis, shift, sizes = sizes.vec(),
       name = std::string(name)](const at::Tensor& grad) {
        return call(kRoll, grad, axis, -shift, sizes, name);
      });
}

}  // namespace

at::Tensor rotate(const at::Tensor& x, int64_t hops, int64_t axis,
                  at::IntArrayRef sizes, const Group& group) {
  checked(kRotate, x, axis, sym_ints(sizes), group);
  if (hops % group.size() == 0) return x;
  return call(kRotate, x, hops, axis, sym_ints(sizes), group.name());
}

at::Tensor rotate(const at::Tensor& x, int64_t hops, const Group& group) {
  checked_axis(kRotate, x, 0);
  const std::vector<int64_t> sizes(static_cast<std::size_t>(group.size()),
                                   x.size(0));
  return rotate(x, hops, 0, sizes, group);
}

at::Tensor roll(const at::Tensor& x, int64_t axis, int64_t shift,
                at::IntArrayRef sizes, const Group& group) {
  checked(kRoll, x, axis, sym_ints(sizes), group);
  const int64_t total = firsts_of(sizes).back();
  if (total == 0 || shift % total == 0) return x;
  return call(kRoll, x, axis, shift, sym_ints(sizes), group.name());
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "rotate(Tensor x, int hops, int axis, SymInt[] sizes, str group) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "roll(Tensor x, int axis, int shift, SymInt[] sizes, str group) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl(kRotate, rotate_meta);
  m.impl(kRoll, roll_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl(kRotate, rotate_here);
  m.impl(kRoll, roll_here);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl(kRotate, rotate_autograd);
  m.impl(kRoll, roll_autograd);
}

}  // namespace longspan
