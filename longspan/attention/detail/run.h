#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "longspan/ops/tensors.h"

namespace longspan {

/// Checks the shapes of the arguments: the same on every rank, and all that
/// tracing can see.
void check_attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const OptionalTensor& sink, double scale, double softcap);

/// [rows, tokens, heads, channels] of [B, H, L, D] or [L, H, D]; channels are
/// contiguous, the rest may be strided.
at::Tensor rows_first(const at::Tensor& tensor);

/// The operator attend, below autograd: out and lse.
Tensors2 attend_forward(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const OptionalTensor& sink,
                        const at::Tensor& layout, double scale, double softcap,
                        const std::string& strategy, int64_t head_ranks,
                        const std::string& group_name);

/// The operator attend_backward: dq, dk, dv, and dsink (empty without a sink).
Tensors4 attend_backward(const at::Tensor& dout, const at::Tensor& q,
                         const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& sink, const at::Tensor& out,
                         const at::Tensor& lse, const at::Tensor& layout,
                         double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group_name);

}  // namespace longspan
