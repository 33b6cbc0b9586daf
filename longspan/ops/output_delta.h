#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// What every derivative of a softmax takes away: the sum over channels of
/// out * dout in the accumulation type, 0 where lse is -inf. out and dout are
/// [rows, queries, heads, channels], lse [rows, queries, heads] of any finite
/// or infinite logs of keys, with or without a sink.
at::Tensor output_delta(const at::Tensor& out, const at::Tensor& dout,
                        const at::Tensor& lse);

}  // namespace longspan
