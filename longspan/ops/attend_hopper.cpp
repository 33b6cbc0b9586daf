#include "longspan/ops/attend_hopper.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

AttentionInputs aligned(AttentionInputs in) {
  in.q = with_aligned_rows(in.q);
  in.k = with_aligned_rows(in.k);
  in.v = with_aligned_rows(in.v);
  return in;
}

}  // namespace

std::optional<std::string> why_not_hopper(const AttentionInputs& inputs,
                                          std::span<const KeyLines> lines) {
  if (!inputs.q.is_cuda()) return "the tensors are not on CUDA";
  if (inputs.q.scalar_type() != at::kBFloat16)
    return "elements are not bfloat16";
  const c10::OptionalDeviceGuard guard(inputs.q.device());
  hopper::DenseForwardArgs args;
  fill(args, aligned(inputs), lines);
  return hopper::why_not_attention(args);
}

void attend_tiles_hopper(const AttentionInputs& inputs,
                         std::span<const KeyLines> lines,
                         Accumulator& running) {
  const c10::OptionalDeviceGuard guard(inputs.q.device());
  const AttentionInputs in = aligned(inputs);
  hopper::DenseForwardArgs args;
  fill(args, in, lines);
  std::optional<PartialAttention> first =
      running.first_part(in.q.scalar_type());
  const PartialAttention& to = first ? *first : running.sums();
  args.goes_on = !first;
  args.out_type = *element_type(to.out.scalar_type());
  args.out = array_of<void*>(to.out);
  args.lse = array_of<void*>(to.lse);
  const hopper::WorkTable table = hopper::forward_work(args);
  const at::Tensor memory = at::empty({static_cast<int64_t>(table.bytes())},
                                      in.q.options().dtype(at::kByte));
  hopper::attention_forward(args, table, memory.mutable_data_ptr(),
                            current_stream(in.q));
  if (first) running.begin(*std::move(first));
}

}  // namespace longspan
