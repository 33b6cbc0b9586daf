#include "longspan/kernels/attend_selected/ampere/forward/forward.cuh"

#include <stdexcept>

#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/common/ampere/launch.h"

namespace longspan::ampere {

namespace {

constexpr int kMostChannels = 576;

template <int kHeads, int kMostValues, class Element>
cudaError_t launch(const SelectedForwardArgs& args, cudaStream_t stream) {
  using Plan = ForwardPlan<kHeads, kMostValues>;
  return launch_blocks(forward_kernel<Plan, Element>, args, Plan::kHeads,
                       Plan::kThreads, Plan::shared_bytes(args.head_dim),
                       stream);
}

/// As many heads to a block as there are and as fit. Of few values several
/// blocks of 32 heads do better: one computes while others fetch.
template <int kMostValues, class Element>
cudaError_t launch(const SelectedForwardArgs& args, cudaStream_t stream) {
  const int64_t group = args.heads / args.key_heads;
  const size_t most = block_memory();
  const auto fits = [&](size_t bytes) { return bytes <= most; };
  if constexpr (kMostValues == kMostChannels) {
    using Plan = ForwardPlan<64, kMostValues>;
    if (group > 32 && fits(Plan::shared_bytes(args.head_dim))) {
      return launch<64, kMostValues, Element>(args, stream);
    }
  }
  using Plan = ForwardPlan<32, kMostValues>;
  if (group > 16 && fits(Plan::shared_bytes(args.head_dim))) {
    return launch<32, kMostValues, Element>(args, stream);
  }
  return launch<16, kMostValues, Element>(args, stream);
}

template <class Element>
cudaError_t launch(const SelectedForwardArgs& args, cudaStream_t stream) {
  return args.value_dim <= 256 ? launch<256, Element>(args, stream)
                               : launch<kMostChannels, Element>(args, stream);
}

}  // namespace

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& args) {
  if (args.type != ElementType::bfloat16 && args.type != ElementType::float16) {
    return "elements are neither bfloat16 nor float16";
  }
  if (args.head_dim % 8 != 0 || args.value_dim % 8 != 0 ||
      args.head_dim > kMostChannels || args.value_dim > args.head_dim) {
    return "no kernel for " + std::to_string(args.head_dim) + " channels of " +
           std::to_string(args.value_dim) +
           " values (has multiples of 8 up to 576)";
  }
  if (!fits_32_bits(args.rows * args.queries * args.heads) ||
      !fits_32_bits(args.keys)) {
    return "more than 2^30 queries, heads or keys";
  }
  if (!is_aligned(args.q) || !is_aligned(args.kv)) {
    return "q or kv is not aligned to 16 bytes";
  }
  return why_not_since(80);
}

void selected_attention_forward(const SelectedForwardArgs& args, void* stream) {
  if (args.rows * args.queries * args.heads == 0) return;
  if (const auto reason = why_not_attend_selected(args)) {
    throw std::invalid_argument("attend_selected: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  check_launch("attend_selected", args.type == ElementType::bfloat16
                                      ? launch<__nv_bfloat16>(args, on)
                                      : launch<__half>(args, on));
}

}  // namespace longspan::ampere
