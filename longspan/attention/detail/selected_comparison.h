#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "longspan/comm/group.h"

namespace longspan {

/// How far two selections of keys for the same queries differ. In a whole model
/// the inputs of indexers differ by rounding, and then so may the keys around
/// the last slot, whose scores are nearly equal.
struct SelectionComparison {
  int64_t slots = 0;      ///< of all queries
  int64_t differing = 0;  ///< slots whose key is not in the other selection
  int64_t queries = 0;    ///< that have such slots
  at::Tensor per_query;   ///< int64 [Tq]: slots that differ
  /// The farthest that the score of such a key lies from the least score of the
  /// first selection, relative to the size of the scores: the sum over heads
  /// with the absolute value of every factor, at its greatest in the query.
  /// Rounding gives a few epsilons; inf where a query of the first has no keys.
  double worst_gap = 0;
  int64_t worst_query = -1;

  /// "selections differ in 3 of 4096 slots (2 queries); worst gap 3.1e-08 of
  /// the scores, at query 17".
  std::string to_string() const;
};

/// a, b: [Tq, slots] (rows before are fine); q, k and weights are those of the
/// indexer. Lists may have any order; slots outside of the stream are empty.
/// With a layout every rank compares its own queries, and all take part.
SelectionComparison compare_selections(
    const at::Tensor& a, const at::Tensor& b, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& weights,
    const std::optional<at::Tensor>& layout = {},
    const Group& group = Group::solo());

}  // namespace longspan
