#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/core/moves.h"
#include "longspan/core/named_layout.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"

namespace longspan {

/// How one rank's tensors lie in the batch as loaded: all that is needed to
/// bring them back.
///
/// Always true: placement goes from loaded tokens (one row's S, or all B * S)
/// to padded tokens (S', or T), and those are the tokens of the ownership.
struct Cut {
  Form form = Form::rows;
  int64_t rows = 0;
  int64_t length = 0;
  /// Where the documents lie after padding: one packing of S' tokens for each
  /// row, or one of T tokens.
  std::vector<Packing> packings;
  Moves placement;
  Ownership ownership;
  int rank = 0;

  int ranks() const { return ownership.ranks(); }
  int64_t local_tokens() const { return ownership.local_tokens(rank); }

  /// The token axis of tensors made by shard(): 1 for rows, 0 for a stream.
  int64_t axis() const { return form == Form::rows ? 1 : 0; }

  /// For every local token its index in the padded row or stream; int64, CPU.
  at::Tensor global_tokens() const;

  std::string to_string() const;
};

/// For every local token of a rank its index in the stream; int64, CPU.
at::Tensor token_indices(const Ownership& ownership, int rank);

}  // namespace longspan
