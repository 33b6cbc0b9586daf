#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "longspan/comm/group.h"

namespace longspan {

/// A part of a tensor along one axis.
struct Part {
  int64_t axis = 0;
  int64_t begin = 0;
  int64_t length = 0;
  at::Tensor of(const at::Tensor& tensor) const;
};

/// What goes from a part of one rank's tensor to a part of another's.
struct Piece {
  int from = 0;
  int to = 0;
  Part source;
  Part target;
};

/// Where several pieces meet in one place they are added, or they never do.
enum class Meeting { never, add };

/// Every collective is this with another list of pieces. The list needs only
/// those of this rank, ordered by `from`; between two ranks both sides list
/// them in the same order. Places that no piece reaches are zero where pieces
/// add, and undefined where they do not.
at::Tensor carry(const at::Tensor& x, const std::vector<Piece>& pieces,
                 const std::vector<int64_t>& target_sizes, Meeting meeting,
                 const Group& group, const std::string& purpose);

}  // namespace longspan
