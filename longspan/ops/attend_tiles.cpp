#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "longspan/core/check.h"
#include "longspan/kernels/attention.h"
#include "longspan/ops/attend_fused.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ElementType::float32;
    case at::kBFloat16:
      return ElementType::bfloat16;
    case at::kHalf:
      return ElementType::float16;
    case at::kDouble:
      return ElementType::float64;
    default:
      throw InternalError(join("attend_tiles: ", dtype, " came this far"));
  }
}

template <class Pointer>
TokenArray<Pointer> array_of(const at::Tensor& tensor) {
  promise(tensor.dim() == 3 || tensor.size(3) <= 1 || tensor.stride(3) == 1,
          "attend_tiles: the channels of ", describe(tensor),
          " are not contiguous");
  Pointer data = nullptr;
  if constexpr (std::is_same_v<Pointer, void*>) {
    data = tensor.mutable_data_ptr();
  } else {
    data = tensor.const_data_ptr();
  }
  return {data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void fill(AttentionArgs& args, const AttentionInputs& in,
          std::span<const KeyLines> lines) {
  args.type = element_type(in.q.scalar_type());
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

void torch_threads(int64_t items, int64_t grain,
                   const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, items, grain, body);
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
  if (inputs.q.is_cpu()) return std::string(attention_kernels().back().name);
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
  attention_kernels().back().forward(args, torch_threads);
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
  attention_kernels().back().backward(args, torch_threads);
}

}  // namespace longspan
