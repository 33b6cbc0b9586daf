#include "longspan/attention/selected_exchange.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/comm/agree.h"
#include "longspan/comm/exchange.h"
#include "longspan/core/check.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

namespace {

/// One contiguous part for each rank: what goes to it and what comes from it.
void exchange(const std::vector<at::Tensor>& to,
              const std::vector<at::Tensor>& from, const Traffic& traffic,
              const std::string& what, at::Device device) {
  std::vector<Parcel> sends, receives;
  for (int peer = 0; peer < traffic.group.size(); ++peer) {
    if (peer == traffic.group.rank()) continue;
    const auto at = static_cast<std::size_t>(peer);
    sends.push_back({peer, to[at]});
    receives.push_back({peer, from[at]});
  }
  traffic.exchange(std::move(sends), std::move(receives), what, device);
}

/// Side by side along the last axis, and apart again.
at::Tensor side_by_side(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts, -1);
}

std::vector<at::Tensor> apart(const at::Tensor& both,
                              const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> parts;
  int64_t at = 0;
  for (const at::Tensor& part : like) {
    parts.push_back(both.narrow(-1, at, part.size(-1)));
    at += part.size(-1);
  }
  return parts;
}

/// A tensor cut along its first axis, a part for each rank.
std::vector<at::Tensor> cut(const at::Tensor& tensor,
                            const std::vector<int64_t>& firsts) {
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i + 1 < firsts.size(); ++i) {
    parts.push_back(tensor.narrow(0, firsts[i], firsts[i + 1] - firsts[i]));
  }
  return parts;
}

/// Where the share of each rank begins in rank order, and the end.
std::vector<int64_t> share_firsts(const Ownership& ownership) {
  std::vector<int64_t> firsts;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    firsts.push_back(ownership.first_of(rank));
  }
  firsts.push_back(ownership.tokens());
  return firsts;
}

std::vector<int64_t> with_first_axis(const at::Tensor& tensor, int64_t size) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = size;
  return sizes;
}

}  // namespace

Fetch fetch_named(const char* who, const std::string& name) {
  if (name == "gathered") return Fetch::gathered;
  check(name == "needed", who, ": fetch is '", name,
        "'; expected 'gathered' or 'needed'");
  return Fetch::needed;
}

std::string name_of(Fetch fetch) {
  return fetch == Fetch::gathered ? "gathered" : "needed";
}

void Traffic::exchange(std::vector<Parcel> sends, std::vector<Parcel> receives,
                       const std::string& what, at::Device device) const {
  const std::string aim = join(purpose, ", ", what);
  start_exchange(group, std::move(sends), std::move(receives), aim,
                 layout->fingerprint() ^ hash_bytes(aim.data(), aim.size()),
                 device)
      .wait();
}

at::Tensor gather_stream(const at::Tensor& mine, const Traffic& traffic,
                         const std::string& what) {
  if (traffic.is_here()) return mine;
  const Ownership& ownership = traffic.layout->ownership();
  at::Tensor all = mine;
  if (traffic.group.size() > 1) {
    const at::Tensor whole = mine.contiguous();
    all = at::empty(with_first_axis(mine, ownership.tokens()), mine.options());
    const auto places = cut(all, share_firsts(ownership));
    const auto here = static_cast<std::size_t>(traffic.group.rank());
    places[here].copy_(whole);
    exchange(std::vector(places.size(), whole), places, traffic, what,
             mine.device());
  }
  return move_tokens(all, 0, traffic.layout->to_stream());
}

at::Tensor sum_home(const at::Tensor& found, const Traffic& traffic,
                    const std::string& what) {
  if (traffic.is_here()) return found;
  const at::Tensor all =
      move_tokens(found, 0, traffic.layout->to_shares()).contiguous();
  if (traffic.group.size() == 1) return all;
  const auto parts = cut(all, share_firsts(traffic.layout->ownership()));
  const auto here = static_cast<std::size_t>(traffic.group.rank());
  std::vector<at::Tensor> coming;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    coming.push_back(rank == here ? parts[here] : at::empty_like(parts[here]));
  }
  exchange(parts, coming, traffic, what, found.device());
  at::Tensor sum = here == 0 ? coming[0].clone() : coming[0];
  for (std::size_t rank = 1; rank < coming.size(); ++rank) {
    sum.add_(coming[rank]);
  }
  return sum;
}

std::vector<at::Tensor> gather_rows(const std::vector<at::Tensor>& mine,
                                    const Traffic& traffic,
                                    const std::string& what) {
  std::vector<at::Tensor> rows;
  const auto all =
      traffic.is_here()
          ? mine
          : apart(gather_stream(side_by_side(mine), traffic, what), mine);
  for (const at::Tensor& part : all) rows.push_back(part.transpose(0, 1));
  return rows;
}

FetchedKeys::FetchedKeys(const at::Tensor& lists, Fetch fetch, Traffic traffic)
    : is_needed_(fetch == Fetch::needed && traffic.group.size() > 1),
      traffic_(std::move(traffic)),
      lists_(lists),
      rows_(lists.size(0)) {
  if (is_needed_) ask(lists);
}

void FetchedKeys::ask(const at::Tensor& lists) {
  const SelectedLayout& layout = *traffic_.layout;
  const int64_t tokens = layout.tokens(), all = tokens * rows_;
  check(all < std::numeric_limits<int32_t>::max(), traffic_.purpose, ": ",
        rows_, " rows of ", tokens,
        " tokens; needed rows are counted in 32 bits, fetch them 'gathered'");
  const auto longs = lists.options().dtype(at::kLong);
  // A place is rank-major, token by token and row by row; `all` is no place.
  const at::Tensor listed = lists.to(at::kLong);
  const at::Tensor empty = (listed < 0).logical_or_(listed >= tokens);
  at::Tensor places = listed;
  if (!layout.to_stream().is_identity()) {
    const at::Tensor place_of =
        move_tokens(at::arange(tokens, longs), 0, layout.to_stream());
    places = at::constant_pad_nd(place_of, {0, 1})
                 .index_select(0, listed.masked_fill(empty, tokens).flatten())
                 .view_as(listed);
  }
  std::vector<int64_t> by_row(static_cast<std::size_t>(lists.dim()), 1);
  by_row[0] = rows_;
  places = (places * rows_ + at::arange(rows_, longs).view(by_row))
               .masked_fill_(empty, all)
               .flatten();
  at::Tensor seen =
      at::zeros({all + 1}, longs.dtype(at::kBool)).index_fill_(0, places, 1);
  seen.narrow(0, all, 1).fill_(0);
  const at::Tensor wanted = seen.nonzero().squeeze(1);  // waits for the device
  const at::Tensor number =
      (seen.cumsum(0, at::kInt) - 1).masked_fill_(seen.logical_not(), -1);
  // The rows of the batch end to end become one.
  auto sizes = lists.sizes().vec();
  sizes[1] *= sizes[0];
  sizes[0] = 1;
  lists_ = number.index_select(0, places).view(sizes);

  std::vector<int64_t> borders = share_firsts(layout.ownership());
  for (int64_t& border : borders) border *= rows_;
  const at::Tensor ends = at::searchsorted(
      wanted, at::tensor(borders, longs.device(at::kCPU)).to(lists.device()));
  const int64_t ranks = traffic_.group.size();
  const at::Tensor counts = ends.narrow(0, 1, ranks) - ends.narrow(0, 0, ranks);
  const at::Tensor theirs = at::zeros_like(counts);
  std::vector<int64_t> ones(static_cast<std::size_t>(ranks) + 1);
  for (std::size_t i = 0; i < ones.size(); ++i) {
    ones[i] = static_cast<int64_t>(i);
  }
  exchange(cut(counts, ones), cut(theirs, ones), traffic_, "counts of rows",
           lists.device());
  const at::Tensor known = at::cat({ends, theirs}).cpu();
  const int64_t* const numbers = known.const_data_ptr<int64_t>();
  firsts_.assign(numbers, numbers + ranks + 1);

  std::vector<at::Tensor> questions;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    questions.push_back(
        (wanted.narrow(0, firsts_[r], firsts_[r + 1] - firsts_[r]) - borders[r])
            .to(at::kInt));
    asked_.push_back(
        at::empty({numbers[ranks + 1 + rank]}, longs.dtype(at::kInt)));
  }
  exchange(questions, asked_, traffic_, "places of rows", lists.device());
  own_ = questions[static_cast<std::size_t>(traffic_.group.rank())];
}

std::vector<at::Tensor> FetchedKeys::rows_of(
    const std::vector<at::Tensor>& mine, const std::string& what) const {
  if (!is_needed_) return gather_rows(mine, traffic_, what);
  return apart(needed_rows(side_by_side(mine), what), mine);
}

at::Tensor FetchedKeys::needed_rows(const at::Tensor& mine,
                                    const std::string& what) const {
  const at::Tensor flat = mine.reshape({-1, mine.size(2)});
  const at::Tensor rows =
      at::empty({firsts_.back(), mine.size(2)}, mine.options());
  const auto places = cut(rows, firsts_);
  std::vector<at::Tensor> leaving;
  for (const at::Tensor& asked : asked_) {
    leaving.push_back(flat.index_select(0, asked));
  }
  places[static_cast<std::size_t>(traffic_.group.rank())].copy_(
      flat.index_select(0, own_));
  exchange(leaving, places, traffic_, what, mine.device());
  return rows.unsqueeze(0);
}

at::Tensor FetchedKeys::queries(const at::Tensor& x) const {
  return is_needed_ ? x.flatten(0, 1).unsqueeze(0) : x;
}

std::vector<at::Tensor> FetchedKeys::home(const std::vector<at::Tensor>& found,
                                          const std::string& what) const {
  if (is_needed_) return apart(needed_home(side_by_side(found), what), found);
  if (!traffic_.is_here()) {
    const at::Tensor all = side_by_side(found).transpose(0, 1);
    return apart(sum_home(all, traffic_, what), found);
  }
  std::vector<at::Tensor> tokens;
  for (const at::Tensor& part : found) tokens.push_back(part.transpose(0, 1));
  return tokens;
}

at::Tensor FetchedKeys::needed_home(const at::Tensor& found,
                                    const std::string& what) const {
  const auto parts = cut(found.squeeze(0).contiguous(), firsts_);
  const auto here = static_cast<std::size_t>(traffic_.group.rank());
  std::vector<at::Tensor> coming;
  for (const at::Tensor& asked : asked_) {
    coming.push_back(
        at::empty({asked.size(0), found.size(2)}, found.options()));
  }
  exchange(parts, coming, traffic_, what, found.device());
  at::Tensor sum =
      at::zeros({traffic_.layout->local_tokens() * rows_, found.size(2)},
                found.options());
  for (std::size_t rank = 0; rank < coming.size(); ++rank) {
    // No place twice, so the order inside a part does not matter.
    sum.index_add_(0, rank == here ? own_ : asked_[rank],
                   rank == here ? parts[here] : coming[rank]);
  }
  return sum.view({traffic_.layout->local_tokens(), rows_, found.size(2)});
}

}  // namespace longspan
