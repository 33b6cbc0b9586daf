#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>

#include <vector>

#include "longspan/core/check.h"
#include "longspan/kernels/attention.h"
#include "longspan/ops/attend_fused.h"
#include "longspan/ops/threads.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

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

/// A thread is worth its start for a few million multiplications.
ParallelFor threads_for(const AttentionInputs& in,
                        std::span<const KeyLines> lines) {
  constexpr int64_t kWorthAThread = 1 << 21;
  int64_t pairs = 0;
  for (const KeyLines& line : lines) pairs += count_pairs(line);
  const int64_t work = pairs * in.q.size(2) * (in.q.size(3) + in.v.size(3));
  return torch_threads(work / kWorthAThread);
}

std::vector<FusedSegment> segments_of(std::span<const KeyLines> lines) {
  std::vector<FusedSegment> segments;
  for (const KeyLines& line : lines) {
    const auto parts = fused_segments(line);
    segments.insert(segments.end(), parts.begin(), parts.end());
  }
  return segments;
}

}  // namespace

std::string which_kernel(const AttentionInputs& inputs) {
  if (inputs.q.is_cpu())
    return describe_chosen_kernels(
        element_type(inputs.q.scalar_type()).value_or(ElementType::float32));
  const auto reason = why_not_flash(inputs);
  return reason ? "blocked, not flash: " + *reason : "flash";
}

void attend_tiles(const AttentionInputs& inputs,
                  std::span<const KeyLines> lines, PartialAttention& running) {
  if (lines.empty() || running.out.numel() == 0) return;
  if (!inputs.q.is_cpu()) {
    return why_not_flash(inputs)
               ? attend_tiles_blocked(inputs, lines, running)
               : attend_tiles_flash(inputs, segments_of(lines), running);
  }
  AttentionForwardArgs args;
  fill(args, inputs, lines);
  args.out = array_of<void*>(running.out);
  args.lse = array_of<void*>(running.lse);
  chosen_attention_kernels().forward(args, threads_for(inputs, lines));
}

void attend_tiles_backward(const AttentionInputs& inputs,
                           std::span<const KeyLines> lines,
                           AttentionGradients& gradients) {
  if (lines.empty() || inputs.q.numel() == 0) return;
  if (!inputs.q.is_cpu()) {
    return why_not_flash(inputs)
               ? attend_tiles_backward_blocked(inputs, lines, gradients)
               : attend_tiles_backward_flash(inputs, segments_of(lines),
                                             gradients);
  }
  AttentionBackwardArgs args;
  fill(args, inputs, lines);
  args.dout = array_of<const void*>(gradients.dout);
  args.lse = array_of<const void*>(gradients.lse);
  args.delta = array_of<const void*>(gradients.delta);
  args.dq = array_of<void*>(gradients.dq);
  args.dk = array_of<void*>(gradients.dk);
  args.dv = array_of<void*>(gradients.dv);
  chosen_attention_kernels().backward(args, threads_for(inputs, lines));
}

}  // namespace longspan
