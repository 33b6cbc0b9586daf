#include "longspan/ops/select_keys/cpu.h"

#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/threads.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

const KeySelectionKernels& kernels() {
  return chosen_attention_kernels().selection;
}

}  // namespace

void select_keys_cpu(const IndexerInputs& in, const at::Tensor& start,
                     const at::Tensor& end, at::Tensor& indices,
                     at::Tensor& scores) {
  SelectKeysArgs args;
  in.fill(args, indices.size(2));
  args.start = without_heads<const int32_t*>(start);
  args.end = without_heads<const int32_t*>(end);
  args.indices = without_heads<int32_t*>(indices);
  if (scores.defined()) args.scores = without_heads<void*>(scores);
  if (indices.numel() > 0) {
    kernels().select(args, threads_for(in.q.numel() * in.k.size(1)));
  }
}

at::Tensor top_keys_cpu(const at::Tensor& scores, int64_t slots,
                        const at::Tensor& start, const at::Tensor& end) {
  at::Tensor indices =
      at::empty({scores.size(0), slots}, scores.options().dtype(at::kInt));
  TopKeysArgs args{
      .type = *element_type(scores.scalar_type()),
      .queries = scores.size(0),
      .keys = scores.size(1),
      .slots = slots,
      .scores = scores.const_data_ptr(),
      .stride = scores.stride(0),
      .start = start.const_data_ptr<int32_t>(),
      .end = end.const_data_ptr<int32_t>(),
      .indices = indices.mutable_data_ptr<int32_t>(),
  };
  if (indices.numel() > 0) {
    kernels().top_keys(args, torch_threads(scores.numel() >> 16));
  }
  return indices;
}

at::Tensor score_selected_cpu(const IndexerInputs& in,
                              const at::Tensor& indices) {
  at::Tensor scores = at::empty(indices.sizes(), sums_like(in.q));
  ScoreSelectedArgs args;
  in.fill(args, indices.size(2));
  args.indices = without_heads<const int32_t*>(indices);
  args.scores = without_heads<void*>(scores);
  if (scores.numel() > 0) {
    kernels().score(args, threads_for(in.q.numel() * indices.size(2)));
  }
  return scores;
}

IndexerGradients score_selected_backward_cpu(const IndexerInputs& in,
                                             const at::Tensor& indices,
                                             const at::Tensor& dscores) {
  IndexerGradients sums{at::zeros(in.q.sizes(), sums_like(in.q)),
                        at::zeros(in.k.sizes(), sums_like(in.q)),
                        at::zeros(in.weights.sizes(), sums_like(in.q))};
  ScoreSelectedBackwardArgs args;
  in.fill(args, indices.size(2));
  args.indices = without_heads<const int32_t*>(indices);
  args.dscores = without_heads<const void*>(dscores);
  args.dq = array_of<void*>(sums.dq);
  args.dk = without_heads<void*>(sums.dk);
  args.dweights = array_of<void*>(sums.dweights);
  if (dscores.numel() > 0) {
    kernels().score_backward(args, threads_for(in.q.numel() * indices.size(2)));
  }
  return sums;
}

}  // namespace longspan
