#include "longspan/batch/cut.h"

#include <ATen/ATen.h>

#include <numeric>

#include "longspan/batch/derive.h"
#include "longspan/core/detail/check.h"

namespace longspan {

at::Tensor token_indices(const Ownership& ownership, int rank) {
  at::Tensor indices =
      at::empty({ownership.local_tokens(rank)}, at::TensorOptions(at::kLong));
  int64_t* out = indices.mutable_data_ptr<int64_t>();
  for (TokenRange range : ownership.ranges_of(rank)) {
    std::iota(out, out + range.size(), range.begin);
    out += range.size();
  }
  return indices;
}

at::Tensor Cut::global_tokens() const {
  return token_indices(ownership, rank);
}

std::string Cut::to_string() const {
  return join("Cut(", longspan::to_string(form), ", ",
              longspan::to_string(ownership.kind()), ", rank ", rank, " of ",
              ranks(), ", ", local_tokens(), " of ", ownership.tokens(),
              form == Form::rows ? join(" tokens in each of ", rows, " rows)")
                                 : std::string(" tokens)"));
}

}  // namespace longspan
