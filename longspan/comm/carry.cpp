#include "longspan/comm/detail/carry.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/exchange.h"
#include "longspan/comm/detail/linear.h"

namespace longspan {

namespace {

at::ScalarType sum_type(at::ScalarType dtype) {
  const bool narrow = at::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  return narrow ? at::kFloat : dtype;
}

/// A view of a range, a copy of listed places.
at::Tensor cut(const at::Tensor& tensor, const Part& part) {
  return part.places.defined()
             ? tensor.index_select(part.axis, part.places)
             : tensor.narrow(part.axis, part.begin, part.length);
}

std::vector<int64_t> sizes_of(const at::Tensor& tensor, const Part& part) {
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<std::size_t>(part.axis)] =
      part.places.defined() ? part.places.numel() : part.length;
  return sizes;
}

bool is_whole(const at::Tensor& tensor, const Part& part) {
  return !part.places.defined() && part.length == tensor.size(part.axis);
}

/// Whether every rank's part is one run of memory of the same size.
bool is_even(const at::Tensor& x, int64_t axis, at::IntArrayRef sizes) {
  for (int64_t i = 0; i < axis; ++i) {
    if (x.size(i) != 1) return false;
  }
  return std::ranges::all_of(sizes,
                             [&](int64_t size) { return size == sizes[0]; });
}

/// Something that comes here, and what it does when it is here.
struct Arrival {
  at::Tensor target;
  const Part* part;
  enum class Act { copy, add } act;
  at::Tensor value;

  void take_effect() const {
    if (part->places.defined()) {
      act == Act::add
          ? target.index_add_(part->axis, part->places,
                              value.to(target.scalar_type()))
          : target.index_copy_(part->axis, part->places.to(at::kLong), value);
      return;
    }
    const at::Tensor place = cut(target, *part);
    if (place.is_alias_of(value)) return;  // received where it belongs
    act == Act::add ? place.add_(value) : place.copy_(value);
  }
};

/// One message to or from a peer.
struct Letter {
  int peer = 0;
  at::ScalarType dtype;
  std::vector<at::Tensor> views = {};      // that leave, in order
  std::vector<std::size_t> arrivals = {};  // that come, in order
};

Letter& letter_for(int peer, at::ScalarType dtype,
                   std::vector<Letter>& letters) {
  for (Letter& letter : letters) {
    if (letter.peer == peer && letter.dtype == dtype) return letter;
  }
  return letters.emplace_back(Letter{.peer = peer, .dtype = dtype});
}

/// Views that lie end to end in memory, as one; undefined where they do not.
at::Tensor end_to_end(const std::vector<at::Tensor>& views) {
  const at::Tensor& first = views[0];
  int64_t next = first.storage_offset();
  for (const at::Tensor& view : views) {
    if (!view.is_contiguous() || !view.is_alias_of(first) ||
        view.storage_offset() != next) {
      return {};
    }
    next += view.numel();
  }
  return first.as_strided({next - first.storage_offset()}, {1});
}

Parcel parcel_that_leaves(const Letter& letter) {
  const at::Tensor together = end_to_end(letter.views);
  if (together.defined()) return {letter.peer, together};
  std::vector<at::Tensor> flat;
  for (const at::Tensor& view : letter.views) {
    flat.push_back(view.reshape({-1}));
  }
  return {letter.peer, flat.size() == 1 ? flat[0].contiguous() : at::cat(flat)};
}

/// Room for what comes: the places themselves, or a buffer to copy from.
Parcel parcel_that_comes(const Letter& letter, std::vector<Arrival>& arrivals) {
  std::vector<at::Tensor> places;
  int64_t length = 0;
  for (const std::size_t i : letter.arrivals) {
    const Arrival& arrival = arrivals[i];
    length += c10::multiply_integers(sizes_of(arrival.target, *arrival.part));
    if (arrival.act == Arrival::Act::copy && !arrival.part->places.defined() &&
        arrival.target.scalar_type() == letter.dtype) {
      places.push_back(cut(arrival.target, *arrival.part));
    }
  }
  const at::Tensor direct = places.size() == letter.arrivals.size()
                                ? end_to_end(places)
                                : at::Tensor();
  const at::Tensor room =
      direct.defined()
          ? direct
          : at::empty({length},
                      arrivals[letter.arrivals[0]].target.options().dtype(
                          letter.dtype));
  int64_t at = 0;
  for (const std::size_t i : letter.arrivals) {
    const auto sizes = sizes_of(arrivals[i].target, *arrivals[i].part);
    const int64_t count = c10::multiply_integers(sizes);
    arrivals[i].value = room.narrow(0, at, count).view(sizes);
    at += count;
  }
  return {letter.peer, room};
}

}  // namespace

std::vector<at::Tensor> carry(const std::vector<Cargo>& cargo,
                              const Group& group, const Errand& errand) {
  const int me = group.rank();
  std::vector<at::Tensor> targets;
  std::vector<Arrival> arrivals;
  std::vector<Letter> leaving, coming;
  for (const Cargo& each : cargo) {
    const at::Tensor& x = each.x;
    const bool adds = each.meeting == Meeting::add;
    at::Tensor target = at::empty(
        each.target_sizes,
        x.options().dtype(adds ? sum_type(x.scalar_type()) : x.scalar_type()));
    bool first = true;
    for (const Piece& piece : each.pieces) {
      if (piece.from == me && piece.to != me) {
        letter_for(piece.to, x.scalar_type(), leaving)
            .views.push_back(cut(x, piece.source));
      }
      if (piece.to != me) continue;
      // A first one that fills all spares us the zeros.
      const bool copies = !adds || (first && is_whole(target, piece.target));
      if (adds && first && !copies) target.zero_();
      first = false;
      arrivals.push_back({target, &piece.target,
                          copies ? Arrival::Act::copy : Arrival::Act::add,
                          at::Tensor()});
      if (piece.from == me) {
        arrivals.back().value = cut(x, piece.source);
      } else {
        letter_for(piece.from, x.scalar_type(), coming)
            .arrivals.push_back(arrivals.size() - 1);
      }
    }
    if (adds && first) target.zero_();
    targets.push_back(target);
  }
  std::vector<Parcel> sends, receives;
  for (const Letter& letter : leaving) {
    sends.push_back(parcel_that_leaves(letter));
  }
  for (const Letter& letter : coming) {
    receives.push_back(parcel_that_comes(letter, arrivals));
  }
  start_exchange(group, std::move(sends), std::move(receives), errand.purpose,
                 errand.common, cargo[0].x.device())
      .wait();
  for (const Arrival& arrival : arrivals) arrival.take_effect();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i] = targets[i].to(cargo[i].x.scalar_type());
  }
  return targets;
}

at::Tensor carry(const Cargo& cargo, const Group& group, const Errand& errand) {
  return carry(std::vector<Cargo>{cargo}, group, errand)[0];
}

std::vector<Piece> gather_pieces(int64_t axis, at::IntArrayRef sizes, int me) {
  const auto firsts = firsts_of(sizes);
  std::vector<Piece> pieces;
  const auto add = [&](int from, int to) {
    const auto size = sizes[static_cast<std::size_t>(from)];
    pieces.push_back({from,
                      to,
                      {axis, 0, size},
                      {axis, firsts[static_cast<std::size_t>(from)], size}});
  };
  for (int from = 0; from < std::ssize(sizes); ++from) {
    if (from != me) {
      add(from, me);
      continue;
    }
    for (int to = 0; to < std::ssize(sizes); ++to) add(me, to);
  }
  return pieces;
}

std::vector<Piece> trade_pieces(int64_t split, int64_t join,
                                const std::vector<Trader>& traders, int me) {
  std::vector<Piece> pieces;
  for (const Trader& from : traders) {
    for (const Trader& to : traders) {
      if (from.rank != me && to.rank != me) continue;
      pieces.push_back({from.rank,
                        to.rank,
                        {split, to.gets.begin, to.gets.size()},
                        {join, from.puts.begin, from.puts.size()}});
    }
  }
  return pieces;
}

std::vector<Piece> reversed(const std::vector<Piece>& pieces) {
  std::vector<Piece> back;
  for (const Piece& piece : pieces) {
    back.push_back({piece.to, piece.from, piece.target, piece.source});
  }
  std::stable_sort(
      back.begin(), back.end(),
      [](const Piece& a, const Piece& b) { return a.from < b.from; });
  return back;
}

at::Tensor gather_tokens(const at::Tensor& x, int64_t axis,
                         at::IntArrayRef sizes, const Group& group,
                         const Errand& errand) {
  // Once here, rather than for every peer.
  const at::Tensor whole = x.contiguous();
  auto target_sizes = x.sizes().vec();
  target_sizes[static_cast<std::size_t>(axis)] = firsts_of(sizes).back();
  if (group.size() > 1 && is_even(x, axis, sizes)) {
    const at::Tensor target = at::empty(target_sizes, x.options());
    if (gather_at_once(whole, target, group, errand.purpose)) return target;
  }
  return carry({.x = whole,
                .pieces = gather_pieces(axis, sizes, group.rank()),
                .target_sizes = std::move(target_sizes)},
               group, errand);
}

at::Tensor scatter_tokens(const at::Tensor& x, int64_t axis,
                          at::IntArrayRef sizes, const Group& group,
                          const Errand& errand) {
  auto target_sizes = x.sizes().vec();
  target_sizes[static_cast<std::size_t>(axis)] =
      sizes[static_cast<std::size_t>(group.rank())];
  return carry({.x = x,
                .pieces = reversed(gather_pieces(axis, sizes, group.rank())),
                .target_sizes = std::move(target_sizes),
                .meeting = Meeting::add},
               group, errand);
}

}  // namespace longspan
