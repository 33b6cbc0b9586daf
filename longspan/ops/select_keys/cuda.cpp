#include "longspan/ops/select_keys/cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "longspan/kernels/select_keys/hopper/select_keys.h"
#include "longspan/kernels/top_keys/top_keys.h"
#include "longspan/ops/cuda_kernels.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

struct RunSelect {
  size_t (*workspace)(const SelectKeysArgs& args);
  void (*select)(const SelectKeysArgs& args, void* workspace, void* stream);
};
using SelectKernel = CudaKernel<SelectKeysArgs, RunSelect>;
constexpr SelectKernel kSelect[] = {
    {"hopper",
     hopper::why_not_select_keys,
     {hopper::select_keys_workspace, hopper::select_keys}},
    {"ampere",
     ampere::why_not_select_keys,
     {ampere::select_keys_workspace, ampere::select_keys}}};

template <class Args>
using Kernel = CudaKernel<Args, void (*)(const Args& args, void* stream)>;

constexpr Kernel<ScoreSelectedArgs> kScore[] = {
    {"ampere", ampere::why_not_score_selected, ampere::score_selected}};

std::optional<std::string> why_not_score_backward(
    const ScoreSelectedBackwardArgs& args) {
  if (const auto reason = why_not_unordered()) return reason;
  return ampere::why_not_score_selected_backward(args);
}

constexpr Kernel<ScoreSelectedBackwardArgs> kScoreBackward[] = {
    {"ampere", why_not_score_backward, ampere::score_selected_backward}};

IndexerInputs aligned_inputs(const IndexerInputs& in) {
  return {with_aligned_rows(in.q), with_aligned_rows(in.k), in.weights};
}

}  // namespace

std::string which_indexer_kernel_cuda(const IndexerInputs& in, int64_t slots,
                                      IndexerWork work) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const IndexerInputs ready = aligned_inputs(in);
  const auto describe = [&](const auto& kernels, auto args) {
    ready.fill(args, slots);
    return describe_first_able(kernels, args);
  };
  switch (work) {
    case IndexerWork::select:
      return describe(kSelect, SelectKeysArgs());
    case IndexerWork::score:
      return describe(kScore, ScoreSelectedArgs());
    case IndexerWork::score_backward:
      return describe(kScoreBackward, ScoreSelectedBackwardArgs());
  }
  throw InternalError("which_indexer_kernel: unknown work");
}

void select_keys_cuda(const IndexerInputs& in, const at::Tensor& start,
                      const at::Tensor& end, at::Tensor& indices,
                      at::Tensor& scores) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const IndexerInputs ready = aligned_inputs(in);
  SelectKeysArgs args;
  ready.fill(args, indices.size(2));
  args.start = without_heads<const int32_t*>(start);
  args.end = without_heads<const int32_t*>(end);
  args.indices = without_heads<int32_t*>(indices);
  if (scores.defined()) args.scores = without_heads<void*>(scores);
  const auto* kernel = first_able(kSelect, args);
  if (kernel == nullptr) {
    indices = select_keys_composite(in, indices.size(2), start, end);
    if (scores.defined()) scores = score_selected_composite(in, indices);
    return;
  }
  const at::Tensor workspace =
      at::empty({static_cast<int64_t>(kernel->run.workspace(args))},
                indices.options().dtype(at::kByte));
  kernel->run.select(args, workspace.mutable_data_ptr(),
                     current_stream(indices));
}

at::Tensor score_selected_cuda(const IndexerInputs& in,
                               const at::Tensor& indices) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const IndexerInputs ready = aligned_inputs(in);
  ScoreSelectedArgs args;
  ready.fill(args, indices.size(2));
  const auto* kernel = first_able(kScore, args);
  if (kernel == nullptr) return score_selected_composite(in, indices);
  const at::Tensor scores = at::empty(indices.sizes(), sums_like(in.q));
  args.indices = without_heads<const int32_t*>(indices);
  args.scores = without_heads<void*>(scores);
  kernel->run(args, current_stream(scores));
  return scores;
}

IndexerGradients score_selected_backward_cuda(const IndexerInputs& in,
                                              const at::Tensor& indices,
                                              const at::Tensor& dscores) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const IndexerInputs ready = aligned_inputs(in);
  ScoreSelectedBackwardArgs args;
  ready.fill(args, indices.size(2));
  const auto* kernel = first_able(kScoreBackward, args);
  if (kernel == nullptr) {
    return score_selected_backward_composite(in, indices, dscores);
  }
  const IndexerGradients sums{at::empty(in.q.sizes(), in.q.options()),
                              at::zeros(in.k.sizes(), sums_like(in.k)),
                              at::empty(in.weights.sizes(), sums_like(in.q))};
  args.indices = without_heads<const int32_t*>(indices);
  args.dscores = without_heads<const void*>(dscores);
  args.dq = array_of<void*>(sums.dq);
  args.dk = without_heads<void*>(sums.dk);
  args.dweights = array_of<void*>(sums.dweights);
  kernel->run(args, current_stream(sums.dk));
  return sums;
}

bool top_keys_on_device(const at::Tensor& scores, const at::Tensor& start,
                        const at::Tensor& end, at::Tensor& indices) {
  const c10::OptionalDeviceGuard guard(scores.device());
  const auto type = element_type(scores.scalar_type());
  const TopKeysArgs args{
      .type = type.value_or(ElementType::float64),
      .queries = scores.size(0),
      .keys = scores.size(1),
      .slots = indices.size(1),
      .scores = scores.const_data_ptr(),
      .stride = scores.stride(0),
      .start = start.const_data_ptr<int32_t>(),
      .end = end.const_data_ptr<int32_t>(),
      .indices = indices.mutable_data_ptr<int32_t>(),
  };
  if (why_not_top_keys(args)) return false;
  top_keys(args, current_stream(scores));
  return true;
}

}  // namespace longspan
