#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "longspan/attention/detail/selected_exchange.h"

namespace longspan {

/// Queries that travel from their owners to the ranks that work on them, and
/// the results that travel back.
///
/// Rank r works on the r-th piece of the stream, ordered by owner and then by
/// the owner's local order. Every rank knows the whole table from the ownership
/// and the pieces. Tensors are [tokens, ..].
class WorkTrade {
 public:
  WorkTrade(Traffic traffic, const std::vector<TokenRange>& pieces);

  /// What this rank works on, in its order: tokens of the stream.
  const std::vector<TokenRange>& queries() const { return queries_; }

  /// From [local tokens, ..] to [queries here, ..], several tensors in one
  /// exchange.
  std::vector<at::Tensor> to_workers(const std::vector<at::Tensor>& tensors,
                                     const std::string& what) const;

  /// The inverse.
  std::vector<at::Tensor> to_owners(const std::vector<at::Tensor>& tensors,
                                    const std::string& what) const;

 private:
  Traffic traffic_;
  std::vector<TokenRange> queries_;
  std::vector<Piece> pieces_;  // from local tokens to queries here
};

}  // namespace longspan
