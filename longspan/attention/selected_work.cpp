#include "longspan/attention/detail/selected_work.h"

#include <ATen/ATen.h>

namespace longspan {

namespace {

std::vector<at::Tensor> travel(const std::vector<at::Tensor>& tensors,
                               const std::vector<Piece>& pieces, int64_t tokens,
                               const Traffic& traffic,
                               const std::string& what) {
  std::vector<Cargo> cargo;
  for (const at::Tensor& tensor : tensors) {
    auto sizes = tensor.sizes().vec();
    sizes[0] = tokens;
    cargo.push_back(
        {.x = tensor, .pieces = pieces, .target_sizes = std::move(sizes)});
  }
  return carry(cargo, traffic.group, traffic.errand(what));
}

}  // namespace

WorkTrade::WorkTrade(Traffic traffic, const std::vector<TokenRange>& pieces)
    : traffic_(std::move(traffic)) {
  const Ownership& ownership = traffic_.layout->ownership();
  const int me = traffic_.group.rank();
  int64_t at = 0;
  for (int from = 0; from < ownership.ranks(); ++from) {
    int64_t local = 0;
    for (const TokenRange range : ownership.ranges_of(from)) {
      for (int to = 0; to < ownership.ranks(); ++to) {
        const TokenRange moved =
            intersect(range, pieces[static_cast<std::size_t>(to)]);
        if (moved.empty() || (from != me && to != me)) continue;
        const int64_t begin = local + moved.begin - range.begin;
        pieces_.push_back(
            {from, to, {0, begin, moved.size()}, {0, at, moved.size()}});
        if (to != me) continue;
        queries_.push_back(moved);
        at += moved.size();
      }
      local += range.size();
    }
  }
}

std::vector<at::Tensor> WorkTrade::to_workers(
    const std::vector<at::Tensor>& tensors, const std::string& what) const {
  return travel(tensors, pieces_, count_tokens(queries_), traffic_, what);
}

std::vector<at::Tensor> WorkTrade::to_owners(
    const std::vector<at::Tensor>& tensors, const std::string& what) const {
  return travel(tensors, reversed(pieces_), traffic_.layout->local_tokens(),
                traffic_, what);
}

}  // namespace longspan
