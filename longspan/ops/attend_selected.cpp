#include "longspan/ops/attend_selected.h"

#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/cpu.h"
#include "longspan/ops/attend_selected/cuda.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/output_delta.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

/// The natural log of everything that a head gives weight to.
at::Tensor with_sink(const at::Tensor& lse, const at::Tensor& sink) {
  return sink.defined() ? at::logaddexp(lse, sink) : lse;
}

std::string chosen_kernel(const SelectedInputs& in, SelectedWork work) {
  return in.q.is_cpu()
             ? describe_chosen_kernels(*element_type(in.q.scalar_type()))
             : which_selected_kernel_cuda(in, work);
}

}  // namespace

PartialAttention attend_selected(const SelectedInputs& in) {
  const ProfilerRange range([&] {
    return "kernel attend_selected, " +
           chosen_kernel(in, SelectedWork::forward);
  });
  const PartialAttention answer =
      in.q.is_cpu() ? attend_selected_cpu(in) : attend_selected_cuda(in);
  return {answer.out.to(in.q.scalar_type()), answer.lse};
}

SelectedGradients attend_selected_backward(const SelectedInputs& in,
                                           const at::Tensor& dout,
                                           const at::Tensor& out,
                                           const at::Tensor& lse) {
  const ProfilerRange range([&] {
    return "kernel attend_selected backward, " +
           chosen_kernel(in, SelectedWork::backward);
  });
  SelectedResult result;
  result.dout = dout.contiguous();
  result.lse = with_sink(lse, in.sink).contiguous();
  result.delta = output_delta(out, result.dout, lse);
  const SelectedSums sums = in.q.is_cpu()
                                ? attend_selected_backward_cpu(in, result)
                                : attend_selected_backward_cuda(in, result);
  at::Tensor dsink = at::empty({0}, sums_like(in.q));
  if (in.sink.defined()) {
    const at::Tensor share = (in.sink - result.lse).exp();
    dsink = -(result.delta * share.masked_fill(at::isinf(result.lse), 0))
                 .sum(at::IntArrayRef({0, 1}));
  }
  return {sums.dq.to(in.q.scalar_type()), sums.dkv, dsink};
}

at::Tensor selected_weights(const SelectedInputs& in, const at::Tensor& lse) {
  const ProfilerRange range([&] {
    return "kernel selected_weights, " +
           chosen_kernel(in, SelectedWork::weights);
  });
  const at::Tensor all = with_sink(lse, in.sink).contiguous();
  const at::Tensor weights = in.q.is_cpu() ? selected_weights_cpu(in, all)
                                           : selected_weights_cuda(in, all);
  const at::Tensor total = weights.sum(-1, /*keepdim=*/true);
  return at::where(total == 0, 0, weights / total);
}

std::string which_selected_kernel(const at::Tensor& q, const at::Tensor& kv,
                                  const at::Tensor& indices, int64_t value_dim,
                                  SelectedWork work) {
  check_selected("which_selected_kernel", q, kv, indices, {}, 1, value_dim);
  if (q.is_cpu()) {
    return describe_chosen_kernels(*element_type(q.scalar_type()));
  }
  check(q.is_cuda(), "which_selected_kernel: `q` is ", describe(q), " on ",
        q.device(), "; there are kernels for the CPU and for CUDA");
  return which_selected_kernel_cuda(
      SelectedInputs::of(q, kv, indices, {}, 1, value_dim), work);
}

}  // namespace longspan
