#include "longspan/comm/carry.h"

#include <ATen/ATen.h>

#include "longspan/comm/exchange.h"

namespace longspan {

namespace {

at::ScalarType sum_type(at::ScalarType dtype) {
  const bool narrow = at::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  return narrow ? at::kFloat : dtype;
}

}  // namespace

at::Tensor Part::of(const at::Tensor& tensor) const {
  return tensor.narrow(axis, begin, length);
}

at::Tensor carry(const at::Tensor& x, const std::vector<Piece>& pieces,
                 const std::vector<int64_t>& target_sizes, Meeting meeting,
                 const Group& group, const std::string& purpose) {
  const int me = group.rank();
  const bool adds = meeting == Meeting::add;
  at::Tensor target =
      adds ? at::zeros(target_sizes,
                       x.options().dtype(sum_type(x.scalar_type())))
           : at::empty(target_sizes, x.options());
  struct Arrival {
    at::Tensor place;
    at::Tensor value;
  };
  std::vector<Parcel> sends;
  std::vector<Parcel> receives;
  std::vector<Arrival> arrivals;
  for (const Piece& piece : pieces) {
    if (piece.from == me && piece.to != me) {
      sends.push_back({piece.to, piece.source.of(x).contiguous()});
    }
    if (piece.to != me) continue;
    const at::Tensor place = piece.target.of(target);
    if (piece.from == me) {
      arrivals.push_back({place, piece.source.of(x)});
      continue;
    }
    const bool direct = !adds && place.is_contiguous();
    const at::Tensor value =
        direct ? place : at::empty(place.sizes(), x.options());
    receives.push_back({piece.from, value});
    if (!direct) arrivals.push_back({place, value});
  }
  start_exchange(group, std::move(sends), std::move(receives), purpose).wait();
  for (const auto& [place, value] : arrivals) {
    if (adds) {
      place.add_(value);
    } else {
      place.copy_(value);
    }
  }
  return target.to(x.scalar_type());
}

}  // namespace longspan
