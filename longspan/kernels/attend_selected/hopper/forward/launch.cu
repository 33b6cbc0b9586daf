#include <stdexcept>

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/forward/config.h"
#include "longspan/kernels/common/hopper/checks.h"

namespace longspan::hopper {

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& args) {
  if (args.type != ElementType::bfloat16) return "elements are not bfloat16";
  if (args.key_heads != 1) return "there is more than one key head";
  if ((args.head_dim != 512 && args.head_dim != 576) || args.value_dim != 512) {
    return "no kernel for " + std::to_string(args.head_dim) + " channels of " +
           std::to_string(args.value_dim) + " values (has 512 and 576 of 512)";
  }
  const int64_t blocks = (args.heads + 63) / 64;
  if (!fits_32_bits(args.rows * args.queries * blocks) ||
      !fits_32_bits(args.keys) || !fits_32_bits(args.slots)) {
    return "more than 2^30 queries, keys or slots";
  }
  if (!is_aligned(args.q) || !is_aligned(args.kv)) {
    return "q or kv is not aligned to 16 bytes";
  }
  return why_not_here();
}

void selected_attention_forward(const SelectedForwardArgs& args, void* stream) {
  if (args.rows * args.queries * args.heads == 0) return;
  auto reason = why_not_attend_selected(args);
  if (!reason && !is_aligned(args.out)) {
    reason = "out is not aligned to 16 bytes";
  }
  if (reason) throw std::invalid_argument("attend_selected: " + *reason);
  ForwardParams params{};
  params.rows = args.rows;
  params.queries = args.queries;
  params.heads = args.heads;
  params.slots = args.slots;
  params.keys = static_cast<int32_t>(args.keys);
  params.scale = static_cast<float>(args.scale * 1.4426950408889634);
  params.q = static_cast<const __nv_bfloat16*>(args.q.data);
  params.q_row = args.q.row_stride;
  params.q_token = args.q.token_stride;
  params.q_head = args.q.head_stride;
  params.kv = static_cast<const __nv_bfloat16*>(args.kv.data);
  params.kv_row = args.kv.row_stride;
  params.kv_token = args.kv.token_stride;
  params.indices = args.indices.data;
  params.indices_row = args.indices.row_stride;
  params.indices_token = args.indices.token_stride;
  params.sink = static_cast<const float*>(args.sink);
  params.out = static_cast<__nv_bfloat16*>(args.out.data);
  params.out_row = args.out.row_stride;
  params.out_token = args.out.token_stride;
  params.out_head = args.out.head_stride;
  params.lse = static_cast<float*>(args.lse.data);
  params.lse_row = args.lse.row_stride;
  params.lse_token = args.lse.token_stride;
  params.lse_head = args.lse.head_stride;
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("attend_selected",
               args.head_dim == 576
                   ? launch_forward<576>(params, processor_count(), on)
                   : launch_forward<512>(params, processor_count(), on));
}

}  // namespace longspan::hopper
