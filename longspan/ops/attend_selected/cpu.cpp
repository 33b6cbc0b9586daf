#include "longspan/ops/attend_selected/cpu.h"

#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/ops/threads.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

int64_t multiplications(const SelectedInputs& in) {
  return in.q.size(0) * in.q.size(1) * in.q.size(2) * in.slots() *
         (in.q.size(3) + in.value_dim);
}

const SelectedAttentionKernels& kernels() {
  return chosen_attention_kernels().selected;
}

}  // namespace

PartialAttention attend_selected_cpu(const SelectedInputs& in) {
  auto sizes = in.q.sizes().vec();
  sizes.back() = in.value_dim;
  PartialAttention answer{at::empty(sizes, in.q.options()),
                          at::empty(in.q.sizes().slice(0, 3), sums_like(in.q))};
  SelectedForwardArgs args;
  in.fill(args);
  args.sink = in.sink.defined() ? in.sink.const_data_ptr() : nullptr;
  args.out = array_of<void*>(answer.out);
  args.lse = array_of<void*>(answer.lse);
  if (in.q.numel() > 0)
    kernels().forward(args, threads_for(multiplications(in)));
  return answer;
}

SelectedSums attend_selected_backward_cpu(const SelectedInputs& in,
                                          const SelectedResult& result) {
  SelectedSums sums{at::empty(in.q.sizes(), in.q.options()),
                    at::zeros(in.kv.sizes(), sums_like(in.q))};
  SelectedBackwardArgs args;
  in.fill(args);
  args.dout = array_of<const void*>(result.dout);
  args.lse = array_of<const void*>(result.lse);
  args.delta = array_of<const void*>(result.delta);
  args.dq = array_of<void*>(sums.dq);
  args.dkv = array_of<void*>(sums.dkv);
  if (in.q.numel() > 0)
    kernels().backward(args, threads_for(multiplications(in)));
  return sums;
}

at::Tensor selected_weights_cpu(const SelectedInputs& in,
                                const at::Tensor& lse) {
  if (in.q.size(2) == 0) return at::zeros(in.indices.sizes(), sums_like(in.q));
  at::Tensor weights = at::empty(in.indices.sizes(), sums_like(in.q));
  SelectedWeightsArgs args;
  in.fill(args);
  args.lse = array_of<const void*>(lse);
  args.weights = array_of<void*>(weights);
  if (weights.numel() > 0)
    kernels().weights(args, threads_for(multiplications(in)));
  return weights;
}

}  // namespace longspan
