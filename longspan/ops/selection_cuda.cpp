#include "longspan/ops/selection_cuda.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "longspan/core/check.h"
#include "longspan/kernels/hopper/select_keys.h"
#include "longspan/ops/cuda_kernels.h"
#include "longspan/ops/cuda_stream.h"
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
     {hopper::select_keys_workspace, hopper::select_keys}}};

using TopKeysKernel =
    CudaKernel<TopKeysArgs, void (*)(const TopKeysArgs& args, void* stream)>;
constexpr TopKeysKernel kTopKeys[] = {
    {"hopper", hopper::why_not_top_keys, hopper::top_keys}};

IndexerInputs aligned_inputs(const IndexerInputs& in) {
  return {with_aligned_rows(in.q), with_aligned_rows(in.k), in.weights};
}

}  // namespace

std::string which_indexer_kernel_cuda(const IndexerInputs& in, int64_t slots,
                                      IndexerWork work) {
  const c10::OptionalDeviceGuard guard(in.q.device());
  const IndexerInputs ready = aligned_inputs(in);
  SelectKeysArgs args;
  ready.fill(args, slots);
  switch (work) {
    case IndexerWork::select:
      return describe_first_able(kSelect, args);
    case IndexerWork::score:
      return "torch";
    case IndexerWork::score_backward:
      return "torch";
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
      .stride = scores.size(1),
      .start = start.const_data_ptr<int32_t>(),
      .end = end.const_data_ptr<int32_t>(),
      .indices = indices.mutable_data_ptr<int32_t>(),
  };
  const auto* kernel = first_able(kTopKeys, args);
  if (kernel == nullptr) return false;
  kernel->run(args, current_stream(scores));
  return true;
}

}  // namespace longspan
