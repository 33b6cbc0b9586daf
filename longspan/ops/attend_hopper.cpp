#include "longspan/ops/attend_hopper.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

#include "longspan/kernels/attention/hopper/attention.h"
#include "longspan/ops/cuda_kernels.h"
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

template <class Args>
std::optional<std::string> why_not(
    std::optional<std::string> (*ask)(const AttentionArgs& args),
    const AttentionInputs& inputs, std::span<const KeyLines> lines) {
  if (!inputs.q.is_cuda()) return "the tensors are not on CUDA";
  const at::ScalarType type = inputs.q.scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf) {
    return "elements are neither bfloat16 nor float16";
  }
  const c10::OptionalDeviceGuard guard(inputs.q.device());
  const AttentionInputs in = aligned(inputs);
  Args args;
  fill(args, in, lines);
  return ask(args);
}

/// Where the kernels keep a table.
template <class Table>
at::Tensor memory_for(const Table& table, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(table.bytes())},
                   like.options().dtype(at::kByte));
}

}  // namespace

std::optional<std::string> why_not_hopper(const AttentionInputs& inputs,
                                          std::span<const KeyLines> lines) {
  return why_not<hopper::DenseForwardArgs>(hopper::why_not_attention, inputs,
                                           lines);
}

std::optional<std::string> why_not_hopper_backward(
    const AttentionInputs& inputs, std::span<const KeyLines> lines) {
  return why_not<hopper::DenseBackwardArgs>(hopper::why_not_attention_backward,
                                            inputs, lines);
}

void attend_tiles_hopper(const AttentionInputs& inputs,
                         std::span<const KeyLines> lines,
                         Accumulator& running) {
  const c10::OptionalDeviceGuard guard(inputs.q.device());
  const AttentionInputs in = aligned(inputs);
  hopper::DenseForwardArgs args;
  fill(args, in, lines);
  Accumulator::Turn turn = running.begin_turn(in.q.scalar_type());
  if (turn.before.out.defined()) {
    args.before = array_of<const void*>(turn.before.out);
  }
  if (turn.sink.defined()) args.sink = turn.sink.const_data_ptr<float>();
  args.out_type = *element_type(turn.total.out.scalar_type());
  args.out = array_of<void*>(turn.total.out);
  args.lse = array_of<void*>(turn.total.lse);
  const hopper::ForwardWork work = hopper::forward_work(args);
  const at::Tensor memory = memory_for(work, in.q);
  hopper::attention_forward(args, work, memory.mutable_data_ptr(),
                            current_stream(in.q));
  running.end_turn(std::move(turn));
}

void attend_tiles_backward_hopper(const AttentionInputs& inputs,
                                  std::span<const KeyLines> lines,
                                  const AttentionAnswer& answer,
                                  AttentionGradients& gradients) {
  const c10::OptionalDeviceGuard guard(inputs.q.device());
  const AttentionInputs in = aligned(inputs);
  const at::Tensor dout = with_aligned_rows(answer.dout);
  hopper::DenseBackwardArgs args;
  fill(args, in, lines);
  args.dout = array_of<const void*>(dout);
  args.lse = array_of<const void*>(answer.lse);
  args.delta = array_of<const void*>(answer.delta());
  args.in_any_order = !why_not_unordered();
  args.dq_adds = hopper::adds_up_queries(args);
  PartialAttention dq = args.dq_adds
                            ? PartialAttention{gradients.dq.sums().out, {}}
                            : gradients.dq.room(in.q.scalar_type());
  args.dq = array_of<void*>(dq.out);
  args.dq_type = *element_type(dq.out.scalar_type());
  const hopper::BackwardWork work = hopper::backward_work(args);
  args.dk_adds = work.apart > 0;
  const auto place = [&](Accumulator& sum, const at::Tensor& like) {
    return args.dk_adds ? PartialAttention{sum.sums().out, {}}
                        : sum.room(like.scalar_type());
  };
  PartialAttention dk = place(gradients.dk, in.k);
  PartialAttention dv = place(gradients.dv, in.v);
  args.dk = array_of<void*>(dk.out);
  args.dv = array_of<void*>(dv.out);
  args.dk_type = *element_type(dk.out.scalar_type());
  const at::Tensor memory = memory_for(work, in.q);
  hopper::attention_backward(args, work, memory.mutable_data_ptr(),
                             current_stream(in.q));
  if (!args.dq_adds) gradients.dq.add(std::move(dq));
  if (args.dk_adds) return;
  gradients.dk.add(std::move(dk));
  gradients.dv.add(std::move(dv));
}

}  // namespace longspan
