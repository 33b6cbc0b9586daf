#pragma once

#include "longspan/ops/select_keys.h"
#include "longspan/ops/select_keys/inputs.h"

namespace longspan {

/// The lightning indexer from torch's own operators, a few queries at a time:
/// for devices without a kernel. Nothing is read back to the host.

/// int32 [n, slots] from scores [n, Tk] and windows int32 [n].
at::Tensor top_keys_composite(const at::Tensor& scores, int64_t slots,
                              const at::Tensor& start, const at::Tensor& end);

/// int32 [B, Tq, slots]; windows [B, Tq].
at::Tensor select_keys_composite(const IndexerInputs& in, int64_t slots,
                                 const at::Tensor& start,
                                 const at::Tensor& end);

/// [B, Tq, slots] of indices int32 [B, Tq, slots].
at::Tensor score_selected_composite(const IndexerInputs& in,
                                    const at::Tensor& indices);

/// All in the accumulation type.
IndexerGradients score_selected_backward_composite(const IndexerInputs& in,
                                                   const at::Tensor& indices,
                                                   const at::Tensor& dscores);

}  // namespace longspan
