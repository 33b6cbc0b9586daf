#include "longspan/ops/attend_selected/cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/ops/cuda_kernels.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

template <class Args, class Shape = SelectedAttentionArgs>
using Kernel = CudaKernel<Shape, void (*)(const Args& args, void* stream)>;

constexpr Kernel<SelectedForwardArgs> kForward[] = {
    {"hopper", hopper::why_not_attend_selected,
     hopper::selected_attention_forward},
    {"ampere", ampere::why_not_attend_selected,
     ampere::selected_attention_forward}};

template <auto why_not>
std::optional<std::string> why_not_backward(const SelectedBackwardArgs& args) {
  if (const auto reason = why_not_unordered()) return reason;
  return why_not(args);
}

constexpr Kernel<SelectedBackwardArgs, SelectedBackwardArgs> kBackward[] = {
    {"hopper", why_not_backward<hopper::why_not_attend_selected>,
     hopper::selected_attention_backward},
    {"ampere", why_not_backward<ampere::why_not_attend_selected_backward>,
     ampere::selected_attention_backward}};

std::optional<std::string> why_not_generic_weights(
    const SelectedWeightsArgs& args) {
  return ampere::why_not_attend_selected(args);
}

constexpr Kernel<SelectedWeightsArgs, SelectedWeightsArgs> kWeights[] = {
    {"hopper", hopper::why_not_selected_weights, hopper::selected_weights},
    {"ampere", why_not_generic_weights, ampere::selected_weights}};

SelectedInputs aligned_inputs(SelectedInputs in) {
  in.q = with_aligned_rows(in.q);
  in.kv = with_aligned_rows(in.kv);
  return in;
}

}  // namespace

std::string which_selected_kernel_cuda(const SelectedInputs& in,
                                       SelectedWork work) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const SelectedInputs ready = aligned_inputs(in);
  const auto describe = [&](const auto& kernels, auto args) {
    ready.fill(args);
    return describe_first_able(kernels, args);
  };
  switch (work) {
    case SelectedWork::forward:
      return describe(kForward, SelectedForwardArgs());
    case SelectedWork::backward:
      return describe(kBackward, SelectedBackwardArgs());
    case SelectedWork::weights:
      return describe(kWeights, SelectedWeightsArgs());
  }
  throw InternalError("which_selected_kernel: unknown work");
}

PartialAttention attend_selected_cuda(const SelectedInputs& in) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const SelectedInputs ready = aligned_inputs(in);
  SelectedForwardArgs args;
  ready.fill(args);
  const auto* kernel = first_able(kForward, args);
  if (kernel == nullptr) return attend_selected_composite(in);
  auto sizes = in.q.sizes().vec();
  sizes.back() = in.value_dim;
  const PartialAttention answer{
      at::empty(sizes, in.q.options()),
      at::empty(in.q.sizes().slice(0, 3), sums_like(in.q))};
  args.sink = in.sink.defined() ? in.sink.const_data_ptr() : nullptr;
  args.out = array_of<void*>(answer.out);
  args.lse = array_of<void*>(answer.lse);
  kernel->run(args, current_stream(in.q));
  return answer;
}

SelectedSums attend_selected_backward_cuda(const SelectedInputs& in,
                                           const SelectedResult& result) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const SelectedInputs ready = aligned_inputs(in);
  SelectedBackwardArgs args;
  ready.fill(args);
  const auto* kernel = first_able(kBackward, args);
  if (kernel == nullptr) return attend_selected_backward_composite(in, result);
  const at::Tensor dout = with_aligned_rows(result.dout);
  const SelectedSums sums{at::empty(in.q.sizes(), in.q.options()),
                          at::zeros(in.kv.sizes(), sums_like(in.kv))};
  args.dout = array_of<const void*>(dout);
  args.lse = array_of<const void*>(result.lse);
  args.delta = array_of<const void*>(result.delta);
  args.dq = array_of<void*>(sums.dq);
  args.dkv = array_of<void*>(sums.dkv);
  kernel->run(args, current_stream(in.q));
  return sums;
}

at::Tensor selected_weights_cuda(const SelectedInputs& in,
                                 const at::Tensor& lse) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const SelectedInputs ready = aligned_inputs(in);
  SelectedWeightsArgs args;
  ready.fill(args);
  const auto* kernel = first_able(kWeights, args);
  if (kernel == nullptr || in.q.size(2) == 0) {
    return selected_weights_composite(in, lse);
  }
  const at::Tensor weights = at::empty(in.indices.sizes(), sums_like(in.q));
  args.lse = array_of<const void*>(lse);
  args.weights = array_of<void*>(weights);
  kernel->run(args, current_stream(in.q));
  return weights;
}

}  // namespace longspan
