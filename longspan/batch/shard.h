#pragma once

#include <optional>
#include <vector>

#include "longspan/batch/cut.h"
#include "longspan/batch/pack.h"

namespace longspan {

/// One rank's share of a batch.
struct LocalBatch {
  NamedTensors tokens;   ///< [L, ...] or [B, L, ...], in the caller's order,
                         ///< position_ids and padding_mask always among them
  NamedTensors payload;  ///< passed on from the rows
  Cut cut;
};

/// Keeps one rank's tokens of every per-token tensor. Out of place (the shares
/// have memory of their own) and differentiable; positions and padding masks
/// are made from the packing where the batch has none.
LocalBatch shard(const PackedBatch& batch, const Ownership& ownership,
                 int rank);

/// One tensor's share: ownership over the tokens of `axis`.
at::Tensor take_share(const at::Tensor& tensor, const Ownership& ownership,
                      int rank, int64_t axis);

struct UnshardOptions {
  /// Back to the rows as loaded, [B, S, ...]; otherwise padded rows or stream.
  bool trim = true;
  /// Value of loaded tokens that pack left out.
  at::Scalar fill = 0;
  /// Token axis of the shards; that of the cut unless given.
  std::optional<int64_t> axis = {};
};

/// The inverse of shard: the tensors of all ranks, in rank order, become one
/// tensor in the original order. Differentiable. One rank gives a list of one.
at::Tensor unshard(const std::vector<at::Tensor>& shards, const Cut& cut,
                   const UnshardOptions& options = {});

/// unshard of one tensor that holds all shares, end to end in rank order.
at::Tensor unshard(const at::Tensor& shares, const Cut& cut,
                   const UnshardOptions& options = {});

}  // namespace longspan
