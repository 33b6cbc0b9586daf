#pragma once

#include "longspan/ops/select_keys/composite.h"

namespace longspan {

/// The lightning indexer by the kernels of this CPU; the same answers as the
/// composites. `scores` may be undefined: not wanted.
void select_keys_cpu(const IndexerInputs& in, const at::Tensor& start,
                     const at::Tensor& end, at::Tensor& indices,
                     at::Tensor& scores);
at::Tensor top_keys_cpu(const at::Tensor& scores, int64_t slots,
                        const at::Tensor& start, const at::Tensor& end);
at::Tensor score_selected_cpu(const IndexerInputs& in,
                              const at::Tensor& indices);
IndexerGradients score_selected_backward_cpu(const IndexerInputs& in,
                                             const at::Tensor& indices,
                                             const at::Tensor& dscores);

}  // namespace longspan
