#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>

#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/ops/attend_fused.h"
#include "longspan/ops/output_delta.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/threads.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

void fill(AttentionArgs& args, const AttentionInputs& in,
          std::span<const KeyLines> lines) {
  const auto type = element_type(in.q.scalar_type());
  promise(type.has_value(), "attend_tiles: ", in.q.scalar_type(),
          " came this far");
  args.type = *type;
  args.rows = in.q.size(0);
  args.queries = in.q.size(1);
  args.keys = in.k.size(1);
  args.heads = in.q.size(2);
  args.heads_per_key_head = in.heads_per_key_head;
  args.head_offset = in.head_offset;
  args.head_dim = static_cast<int>(in.q.size(3));
  args.value_dim = static_cast<int>(in.v.size(3));
  args.scale = in.scale;
  args.softcap = in.softcap;
  args.q = array_of<const void*>(in.q);
  args.k = array_of<const void*>(in.k);
  args.v = array_of<const void*>(in.v);
  args.lines = lines;
}

namespace {

int64_t multiplications(const AttentionInputs& in,
                        std::span<const KeyLines> lines) {
  int64_t pairs = 0;
  for (const KeyLines& line : lines) pairs += count_pairs(line);
  return pairs * in.q.size(2) * (in.q.size(3) + in.v.size(3));
}

}  // namespace

std::string which_kernel(const AttentionInputs& inputs,
                         std::span<const KeyLines> lines) {
  if (!inputs.q.is_cpu()) return FusedChoice::of(inputs, lines).to_string();
  return describe_chosen_kernels(
      element_type(inputs.q.scalar_type()).value_or(ElementType::float32));
}

const at::Tensor& AttentionAnswer::delta() const {
  if (!known_delta.defined()) {
    known_delta = output_delta(out, dout, lse);
  }
  return known_delta;
}

void attend_tiles(const AttentionInputs& inputs,
                  std::span<const KeyLines> lines, Accumulator& running) {
  if (lines.empty() || inputs.q.numel() == 0) return;
  if (!inputs.q.is_cpu()) return attend_tiles_fused(inputs, lines, running);
  AttentionForwardArgs args;
  fill(args, inputs, lines);
  PartialAttention& sums = running.sums();
  args.out = array_of<void*>(sums.out);
  args.lse = array_of<void*>(sums.lse);
  const ProfilerRange range(
      [&] { return "kernel attend, " + which_kernel(inputs, lines); });
  chosen_attention_kernels().forward(
      args, threads_for(multiplications(inputs, lines)));
}

void attend_tiles_backward(const AttentionInputs& inputs,
                           std::span<const KeyLines> lines,
                           const AttentionAnswer& answer,
                           AttentionGradients& gradients) {
  if (lines.empty() || inputs.q.numel() == 0) return;
  if (!inputs.q.is_cpu()) {
    return attend_tiles_backward_fused(inputs, lines, answer, gradients);
  }
  AttentionBackwardArgs args;
  fill(args, inputs, lines);
  args.dout = array_of<const void*>(answer.dout);
  args.lse = array_of<const void*>(answer.lse);
  args.delta = array_of<const void*>(answer.delta());
  args.dq = array_of<void*>(gradients.dq.sums().out);
  args.dk = array_of<void*>(gradients.dk.sums().out);
  args.dv = array_of<void*>(gradients.dv.sums().out);
  const ProfilerRange range(
      [&] { return "kernel attend backward, " + which_kernel(inputs, lines); });
  chosen_attention_kernels().backward(
      args, threads_for(multiplications(inputs, lines)));
}

}  // namespace longspan
