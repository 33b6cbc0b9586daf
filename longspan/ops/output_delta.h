#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// The delta that every derivative of a softmax subtracts: the sum of out *
/// dout over channels, in the accumulation type, 0 where lse is -inf. out and
/// dout are [rows, queries, heads, channels]; lse is [rows, queries, heads],
/// with or without a sink.
at::Tensor output_delta(const at::Tensor& out, const at::Tensor& dout,
                        const at::Tensor& lse);

}  // namespace longspan
