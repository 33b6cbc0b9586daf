#include "longspan/attention/selected_work.h"

#include <ATen/ATen.h>

namespace longspan {

namespace {

at::Tensor cut(const at::Tensor& tensor,
               const std::vector<TokenRange>& places) {
  std::vector<at::Tensor> parts;
  for (const TokenRange place : places) {
    parts.push_back(tensor.narrow(0, place.begin, place.size()));
  }
  if (parts.empty()) return tensor.narrow(0, 0, 0).contiguous();
  return parts.size() == 1 ? parts[0].contiguous() : at::cat(parts);
}

void paste(const at::Tensor& part, const at::Tensor& into,
           const std::vector<TokenRange>& places) {
  int64_t at = 0;
  for (const TokenRange place : places) {
    into.narrow(0, place.begin, place.size())
        .copy_(part.narrow(0, at, place.size()));
    at += place.size();
  }
}

at::Tensor empty_like(const at::Tensor& tensor, int64_t tokens) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = tokens;
  return at::empty(sizes, tensor.options());
}

}  // namespace

WorkTrade::WorkTrade(Traffic traffic, const std::vector<TokenRange>& pieces)
    : traffic_(std::move(traffic)) {
  const Ownership& ownership = traffic_.layout->ownership();
  const int me = traffic_.group.rank();
  const TokenRange mine = pieces[static_cast<std::size_t>(me)];
  int64_t at = 0;
  for (int rank = 0; rank < ownership.ranks(); ++rank) {
    int64_t count = 0;
    for (const TokenRange range : ownership.ranges_of(rank)) {
      const TokenRange here = intersect(range, mine);
      if (here.empty()) continue;
      queries_.push_back(here);
      count += here.size();
    }
    coming_.push_back({at, at + count});
    at += count;
  }
  for (const TokenRange piece : pieces) {
    std::vector<TokenRange> places;
    int64_t local = 0;
    for (const TokenRange range : ownership.ranges_of(me)) {
      const TokenRange there = intersect(range, piece);
      if (!there.empty()) {
        const int64_t begin = local + there.begin - range.begin;
        append_range(places, {begin, begin + there.size()});
      }
      local += range.size();
    }
    leaving_.push_back(std::move(places));
  }
}

std::vector<at::Tensor> WorkTrade::to_workers(
    const std::vector<at::Tensor>& tensors, const std::string& what) const {
  std::vector<at::Tensor> arrived;
  std::vector<Parcel> sends, receives;
  for (const at::Tensor& tensor : tensors) {
    at::Tensor held = empty_like(tensor, count_tokens(queries_));
    for (int peer = 0; peer < traffic_.group.size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      at::Tensor place = held.narrow(0, coming_[p].begin, coming_[p].size());
      at::Tensor part = cut(tensor, leaving_[p]);
      if (peer == traffic_.group.rank()) {
        place.copy_(part);
      } else {
        sends.push_back({peer, part});
        receives.push_back({peer, place});
      }
    }
    arrived.push_back(held);
  }
  traffic_.exchange(std::move(sends), std::move(receives), what,
                    tensors[0].device());
  return arrived;
}

std::vector<at::Tensor> WorkTrade::to_owners(
    const std::vector<at::Tensor>& tensors, const std::string& what) const {
  struct Arrival {
    at::Tensor part, into;
    std::size_t from;
  };
  std::vector<at::Tensor> owned;
  std::vector<Arrival> arrivals;
  std::vector<Parcel> sends, receives;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor found = tensor.contiguous();
    at::Tensor into = empty_like(tensor, traffic_.layout->local_tokens());
    for (int peer = 0; peer < traffic_.group.size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      at::Tensor part = found.narrow(0, coming_[p].begin, coming_[p].size());
      if (peer != traffic_.group.rank()) {
        sends.push_back({peer, part});
        part = empty_like(tensor, count_tokens(leaving_[p]));
        receives.push_back({peer, part});
      }
      arrivals.push_back({part, into, p});
    }
    owned.push_back(into);
  }
  traffic_.exchange(std::move(sends), std::move(receives), what,
                    tensors[0].device());
  for (const auto& [part, into, from] : arrivals) {
    paste(part, into, leaving_[from]);
  }
  return owned;
}

}  // namespace longspan
