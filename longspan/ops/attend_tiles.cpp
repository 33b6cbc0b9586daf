#include "longspan/ops/attend_tiles.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

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

/// As many threads as torch would use. Not at::parallel_for, which runs on one
/// thread in code that was compiled without OpenMP, nor OpenMP itself, whose
/// runtime torch brings in a copy of its own.
void torch_threads(int64_t items, int64_t grain,
                   const std::function<void(int64_t, int64_t)>& body) {
  const int64_t parts = std::clamp<int64_t>(items / std::max<int64_t>(grain, 1),
                                            1, at::get_num_threads());
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(parts));
  const auto run = [&](int64_t part) {
    try {
      body(items * part / parts, items * (part + 1) / parts);
    } catch (...) {
      errors[static_cast<std::size_t>(part)] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int64_t part = 1; part < parts; ++part)
      threads.emplace_back(run, part);
    run(0);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// Small calls are done before a second thread has started.
ParallelFor threads_for(const AttentionInputs& in,
                        std::span<const KeyLines> lines) {
  constexpr int64_t kLittle = 1 << 22;  // multiplications
  int64_t pairs = 0;
  for (const KeyLines& line : lines) pairs += count_pairs(line);
  const int64_t work = pairs * in.q.size(2) * (in.q.size(3) + in.v.size(3));
  return work < kLittle ? ParallelFor(serial_for) : ParallelFor(torch_threads);
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
  attention_kernels().back().forward(args, threads_for(inputs, lines));
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
  attention_kernels().back().backward(args, threads_for(inputs, lines));
}

}  // namespace longspan
