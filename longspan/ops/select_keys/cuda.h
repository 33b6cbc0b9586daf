#pragma once

#include <string>

#include "longspan/ops/select_keys.h"
#include "longspan/ops/select_keys/composite.h"

namespace longspan {

/// The lightning indexer on CUDA: by kernels where they take it, else by the
/// composites. `scores` may be undefined: not wanted.
void select_keys_cuda(const IndexerInputs& in, const at::Tensor& start,
                      const at::Tensor& end, at::Tensor& indices,
                      at::Tensor& scores);

at::Tensor score_selected_cuda(const IndexerInputs& in,
                               const at::Tensor& indices);

/// `dq` already in the type of q.
IndexerGradients score_selected_backward_cuda(const IndexerInputs& in,
                                              const at::Tensor& indices,
                                              const at::Tensor& dscores);

/// What which_indexer_kernel says of tensors on CUDA.
std::string which_indexer_kernel_cuda(const IndexerInputs& in, int64_t slots,
                                      IndexerWork work);

/// False where no kernel takes it. Rows of scores may be apart.
bool top_keys_on_device(const at::Tensor& scores, const at::Tensor& start,
                        const at::Tensor& end, at::Tensor& indices);

}  // namespace longspan
