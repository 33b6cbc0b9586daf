#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/plan/halo_plan.h"
#include "longspan/plan/pool_plan.h"

namespace longspan {

/// The lists of a plan, as operators take them.

/// int64 [n, 4] on the CPU.
at::Tensor sends_tensor(const std::vector<RowSend>& sends);

struct PoolTables {
  at::Tensor lists;      ///< int32 [whole and parts, slots]
  at::Tensor sends;      ///< int64 [n, 4], stays on the CPU
  at::Tensor merges;     ///< int32 [merged pools, most parts]
  at::Tensor order;      ///< int64 [pools here]
  at::Tensor in_stream;  ///< int64 [all pools]
  int64_t whole = 0, received = 0, halves = 1;

  static PoolTables of(const PoolPlan& plan, at::Device device);
};

/// Softmax pooling of tokens over windows that begin at each document, over the
/// ranks of a group: what one rank gives for the pools of this rank, whatever
/// the ownership.
///
/// values, gates: [tokens, halves * C] of this rank, rows of a batch end to
/// end; bias [ratio, halves * C] or undefined: added to the gates of the tokens
/// of every window. Each channel is pooled on its own, with the softmax of its
/// gates over the slots of the pool, in the accumulation type. With an overlap
/// the first half of the channels counts for the window after a token's own.
/// Returns [pools here, C] of the type of values, in the order of the stream.
/// Differentiable in all three; parameter gradients sum over the ranks.
///
/// A pool that lies on several ranks is pooled by each of them, and the parts
/// (C numbers and the logs of their weights) travel to its owner, who pools
/// them again.
///
/// torch.ops.longspan.pool_tokens(values, gates, bias, lists, sends, merges,
/// order, whole, received, halves, group)
at::Tensor pool_tokens(const at::Tensor& values, const at::Tensor& gates,
                       const std::optional<at::Tensor>& bias,
                       const PoolTables& tables, const Group& group);

/// The pools of all ranks in the order of the stream: [pools here, ..] ->
/// [all pools, ..]. Backward sums over the ranks.
at::Tensor gather_pools(const at::Tensor& pools, const PoolPlan& plan,
                        const PoolTables& tables, const Group& group);

}  // namespace longspan
