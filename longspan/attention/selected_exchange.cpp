#include "longspan/attention/detail/selected_exchange.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/comm/agree.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

namespace {

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

/// How many tokens each rank holds.
std::vector<int64_t> share_sizes(const Ownership& ownership) {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    sizes.push_back(ownership.local_tokens(rank));
  }
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

Errand Traffic::errand(const std::string& what) const {
  const std::string aim = join(purpose, ", ", what);
  return {aim, layout->fingerprint() ^ hash_bytes(aim.data(), aim.size())};
}

at::Tensor gather_stream(const at::Tensor& mine, const Traffic& traffic,
                         const std::string& what) {
  if (traffic.is_here()) return mine;
  const at::Tensor all =
      traffic.group.size() == 1
          ? mine
          : gather_tokens(mine, 0, share_sizes(traffic.layout->ownership()),
                          traffic.group, traffic.errand(what));
  return move_tokens(all, 0, traffic.layout->to_stream());
}

at::Tensor sum_home(const at::Tensor& found, const Traffic& traffic,
                    const std::string& what) {
  if (traffic.is_here()) return found;
  const at::Tensor all = move_tokens(found, 0, traffic.layout->to_shares());
  if (traffic.group.size() == 1) return all.contiguous();
  return scatter_tokens(all, 0, share_sizes(traffic.layout->ownership()),
                        traffic.group, traffic.errand(what));
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
  const RankLayout& layout = *traffic_.layout;
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

  // Counts first, so that everybody knows how many places are asked for.
  const int ranks = traffic_.group.size(), me = traffic_.group.rank();
  std::vector<int64_t> borders = {0};
  for (const int64_t size : share_sizes(layout.ownership())) {
    borders.push_back(borders.back() + size * rows_);
  }
  const at::Tensor ends = at::searchsorted(
      wanted, at::tensor(borders, longs.device(at::kCPU)).to(lists.device()));
  const at::Tensor counts = ends.narrow(0, 1, ranks) - ends.narrow(0, 0, ranks);
  std::vector<Trader> one_each;
  for (int rank = 0; rank < ranks; ++rank) {
    one_each.push_back({rank, {rank, rank + 1}, {rank, rank + 1}});
  }
  const at::Tensor theirs =
      carry({.x = counts,
             .pieces = trade_pieces(0, 0, one_each, me),
             .target_sizes = {ranks}},
            traffic_.group, traffic_.errand("counts of rows"));
  const at::Tensor known = at::cat({ends, theirs}).cpu();
  const int64_t* const numbers = known.const_data_ptr<int64_t>();

  const int64_t* const asks = numbers + ranks + 1;
  std::vector<Trader> traders;
  int64_t asked = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    traders.push_back({rank,
                       {numbers[rank], numbers[rank + 1]},
                       {asked, asked + asks[rank]}});
    asked += asks[rank];
  }
  const at::Tensor places_asked =
      carry({.x = wanted.to(at::kInt),
             .pieces = trade_pieces(0, 0, traders, me),
             .target_sizes = {asked}},
            traffic_.group, traffic_.errand("places of rows"))
          .sub_(borders[static_cast<std::size_t>(me)]);

  needed_ = wanted.size(0);
  for (const Trader& from : traders) {
    const Part here = {0, from.gets.begin, from.gets.size()};
    if (from.rank != me) {
      pieces_.push_back({from.rank, me, {}, here});
      continue;
    }
    for (const Trader& to : traders) {
      pieces_.push_back(
          {me,
           to.rank,
           {.places = places_asked.narrow(0, to.puts.begin, to.puts.size())},
           here});
    }
  }
}

std::vector<at::Tensor> FetchedKeys::rows_of(
    const std::vector<at::Tensor>& mine, const std::string& what) const {
  if (!is_needed_) return gather_rows(mine, traffic_, what);
  const at::Tensor all = side_by_side(mine);
  const at::Tensor rows = carry({.x = all.reshape({-1, all.size(2)}),
                                 .pieces = pieces_,
                                 .target_sizes = {needed_, all.size(2)}},
                                traffic_.group, traffic_.errand(what));
  return apart(rows.unsqueeze(0), mine);
}

at::Tensor FetchedKeys::queries(const at::Tensor& x) const {
  return is_needed_ ? x.flatten(0, 1).unsqueeze(0) : x;
}

std::vector<at::Tensor> FetchedKeys::home(const std::vector<at::Tensor>& found,
                                          const std::string& what) const {
  if (is_needed_) {
    const at::Tensor rows = side_by_side(found).squeeze(0);
    const int64_t tokens = traffic_.layout->local_tokens();
    const at::Tensor sum =
        carry({.x = rows,
               .pieces = reversed(pieces_),
               .target_sizes = {tokens * rows_, rows.size(1)},
               .meeting = Meeting::add},
              traffic_.group, traffic_.errand(what));
    return apart(sum.view({tokens, rows_, rows.size(1)}), found);
  }
  if (!traffic_.is_here()) {
    const at::Tensor all = side_by_side(found).transpose(0, 1);
    return apart(sum_home(all, traffic_, what), found);
  }
  std::vector<at::Tensor> tokens;
  for (const at::Tensor& part : found) tokens.push_back(part.transpose(0, 1));
  return tokens;
}

}  // namespace longspan
