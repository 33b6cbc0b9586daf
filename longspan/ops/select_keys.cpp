#include "longspan/ops/select_keys.h"

#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/select_keys/cpu.h"
#include "longspan/ops/select_keys/cuda.h"
#include "longspan/ops/select_keys/inputs.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

std::string chosen_kernel(const IndexerInputs& in, int64_t slots,
                          IndexerWork work) {
  return in.q.is_cpu()
             ? describe_chosen_kernels(*element_type(in.q.scalar_type()))
             : which_indexer_kernel_cuda(in, slots, work);
}

}  // namespace

Selection select_keys(const IndexerInputs& in, const KeyWindows& windows,
                      int64_t slots, bool with_scores) {
  const ProfilerRange range([&] {
    return "kernel select_keys, " +
           chosen_kernel(in, slots, IndexerWork::select);
  });
  const at::Tensor from = as_window(windows.begin, in.k.size(1));
  const at::Tensor to = as_window(windows.end, in.k.size(1));
  Selection found;
  found.indices = at::empty({in.q.size(0), in.q.size(1), slots},
                            in.q.options().dtype(at::kInt));
  if (with_scores) {
    found.scores = at::empty(found.indices.sizes(), sums_like(in.q));
  }
  (in.q.is_cpu() ? select_keys_cpu : select_keys_cuda)(
      in, from, to, found.indices, found.scores);
  if (!with_scores) {
    found.scores = at::empty({in.q.size(0), in.q.size(1), 0}, sums_like(in.q));
  }
  return found;
}

at::Tensor score_selected(const IndexerInputs& in, const at::Tensor& indices) {
  const ProfilerRange range([&] {
    return "kernel score_selected, " +
           chosen_kernel(in, indices.size(2), IndexerWork::score);
  });
  const at::Tensor lists = as_slots(indices, in.k.size(1)).contiguous();
  return in.q.is_cpu() ? score_selected_cpu(in, lists)
                       : score_selected_cuda(in, lists);
}

IndexerGradients score_selected_backward(const IndexerInputs& in,
                                         const at::Tensor& indices,
                                         const at::Tensor& dscores) {
  const ProfilerRange range([&] {
    return "kernel score_selected backward, " +
           chosen_kernel(in, indices.size(2), IndexerWork::score_backward);
  });
  const at::Tensor lists = as_slots(indices.contiguous(), in.k.size(1));
  const at::Tensor g = dscores.contiguous();
  IndexerGradients sums = in.q.is_cpu()
                              ? score_selected_backward_cpu(in, lists, g)
                              : score_selected_backward_cuda(in, lists, g);
  sums.dq = sums.dq.to(in.q.scalar_type());
  return sums;
}

std::string which_indexer_kernel(const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& weights, int64_t slots,
                                 IndexerWork work) {
  constexpr const char* who = "which_indexer_kernel";
  check_indexer(who, q, k, weights);
  check_slots(who, slots);
  if (q.is_cpu()) {
    return describe_chosen_kernels(*element_type(q.scalar_type()));
  }
  check(q.is_cuda(), who, ": `q` is ", describe(q), " on ", q.device(),
        "; there are kernels for the CPU and for CUDA");
  return which_indexer_kernel_cuda(IndexerInputs::of(q, k, weights), slots,
                                   work);
}

}  // namespace longspan
