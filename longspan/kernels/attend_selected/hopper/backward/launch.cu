#include <algorithm>
#include <stdexcept>

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/backward/config.h"
#include "longspan/kernels/attend_selected/hopper/backward/outputs.cuh"
#include "longspan/kernels/common/hopper/checks.h"

namespace longspan::hopper {

void selected_attention_backward(const SelectedBackwardArgs& args,
                                 void* stream) {
  if (args.rows * args.queries * args.heads == 0) return;
  auto reason = why_not_attend_selected(args);
  if (!reason && (!is_aligned(args.dout) || !is_aligned(args.dq))) {
    reason = "dout or dq is not aligned to 16 bytes";
  }
  if (!reason && !is_aligned(args.dkv, 4)) {
    reason = "dkv is not aligned to 16 bytes";
  }
  if (reason) {
    throw std::invalid_argument("attend_selected backward: " + *reason);
  }
  BackwardParams params{};
  params.rows = args.rows;
  params.queries = args.queries;
  params.heads = args.heads;
  params.slots = args.slots;
  params.keys = static_cast<int32_t>(args.keys);
  params.scale = static_cast<float>(args.scale);
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
  params.dout = static_cast<const __nv_bfloat16*>(args.dout.data);
  params.dout_row = args.dout.row_stride;
  params.dout_token = args.dout.token_stride;
  params.dout_head = args.dout.head_stride;
  params.lse = static_cast<const float*>(args.lse.data);
  params.lse_row = args.lse.row_stride;
  params.lse_token = args.lse.token_stride;
  params.lse_head = args.lse.head_stride;
  params.delta = static_cast<const float*>(args.delta.data);
  params.delta_row = args.delta.row_stride;
  params.delta_token = args.delta.token_stride;
  params.delta_head = args.delta.head_stride;
  params.dq = static_cast<__nv_bfloat16*>(args.dq.data);
  params.dq_row = args.dq.row_stride;
  params.dq_token = args.dq.token_stride;
  params.dq_head = args.dq.head_stride;
  params.dkv = static_cast<float*>(args.dkv.data);
  params.dkv_row = args.dkv.row_stride;
  params.dkv_token = args.dkv.token_stride;
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("attend_selected backward",
               args.head_dim == 576 ? launch_backward<576>(params, on)
                                    : launch_backward<512>(params, on));
}

void output_delta(const OutputDeltaArgs& args, void* stream) {
  const int64_t all = args.rows * args.queries * args.heads;
  if (all == 0) return;
  if (!is_aligned(args.out) || !is_aligned(args.dout) ||
      args.value_dim % 8 != 0) {
    throw std::invalid_argument(
        "output_delta: out or dout is not aligned to 16 bytes");
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      (all * delta_lanes(args.value_dim) + 255) / 256, 16 * processor_count()));
  const auto kernel = args.type == ElementType::float16
                          ? delta_kernel<__half2>
                          : delta_kernel<__nv_bfloat162>;
  kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("output_delta", cudaGetLastError());
}

}  // namespace longspan::hopper
