#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/plan.h"

namespace longspan {

struct AttendOptions {
  std::optional<double> scale = {};  ///< 1 / sqrt(head_dim) unless given
  double softcap = 0;      ///< scores become softcap * tanh(score / softcap)
  at::Tensor sink = {};    ///< [heads]: a logit without a value
  Strategy strategy = {};  ///< the ring unless given
};

struct Attended {
  at::Tensor out;  ///< like q, with the channels of v
  at::Tensor
      lse;  ///< natural log over the keys, the sink left out; no gradient
};

/// Attention of this rank's queries to the keys of all ranks: what one rank
/// would give for these tokens, whatever the ownership, mask and strategy.
///
/// q [B, H, L, D] or [L, H, D], k and v likewise with H or fewer heads that
/// divide it; L are the rank's own tokens, in the ownership's local order.
/// float32, bfloat16 and float16 sum in float32, float64 in float64. A query
/// that sees no key has out 0 and lse -inf, and passes no gradient.
///
/// On the CPU the same call gives the same bits in every run, and an infinity
/// or a NaN reaches exactly the queries that see it. On CUDA gradients may
/// differ in the last bits from run to run unless torch is told to be
/// deterministic, and a NaN may also reach rows of the same block.
///
/// Gradient contract: when every rank backpropagates the loss of its own
/// tokens, the gradients of q, k and v are those of the sum of all losses, so
/// parameter gradients **summed** over the ranks are the full gradients. Every
/// rank must run backward, in the same order as forward.
///
/// Also torch.ops.longspan.attend(q, k, v, sink, layout, scale, softcap,
/// strategy, head_ranks, group) with `layout` from layout_tensor() and the
/// group by name.
Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttentionLayout& layout, const Group& group,
                const AttendOptions& options = {});

/// Which kernel computes such a call on one rank, and why a faster one does
/// not: "avx512", "hopper", "flash, not cudnn: it takes no windows", "blocked,
/// not flash: it has no softcap". One mask, one for each row, or none: causal.
std::string which_kernel(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v,
                         const std::vector<Mask>& masks = {},
                         const AttendOptions& options = {});

/// A layout as the operator takes it: int64 [n], CPU.
at::Tensor layout_tensor(const AttentionLayout& layout);

/// The plan that attend follows on this rank; recent ones are kept.
std::shared_ptr<const Plan> plan_for(const at::Tensor& layout,
                                     const std::string& strategy,
                                     int head_ranks, int64_t key_heads,
                                     int64_t rows, const Group& group);

}  // namespace longspan
