#include <algorithm>
#include <stdexcept>

#include "longspan/kernels/ampere/key_selection.h"
#include "longspan/kernels/ampere/score_checks.h"
#include "longspan/kernels/ampere/select_scores.cuh"
#include "longspan/kernels/hopper/select_keys/top_keys.cuh"

namespace longspan::ampere {

namespace {

/// Scores of a chunk stay in the L2 of large cards until they were selected
/// from.
constexpr int64_t kScratchBytes = 32 << 20;
constexpr int64_t kMostChunk = 4096;
constexpr int kBlocksEach = 8;  // of a processor, so that they end together

/// The selection, one row a block.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    select_kernel(const __grid_constant__ hopper::SelectParams params) {
  extern __shared__ __align__(16) uint8_t memory[];
  const int query = params.first + static_cast<int>(blockIdx.x);
  const hopper::Window window(params, query);
  const float* row = params.given != nullptr
                         ? params.given + query * params.stride
                         : params.scratch + blockIdx.x * params.stride;
  hopper::TopKeys<kThreads> top{
      *reinterpret_cast<typename hopper::TopPlan<kThreads>::Shared*>(memory)};
  top.run(row, window, params.slots,
          params.indices + query * params.indices_token,
          params.scores != nullptr ? params.scores + query * params.scores_token
                                   : nullptr);
}

template <int kThreads>
cudaError_t launch_top_keys(const hopper::SelectParams& params,
                            cudaStream_t stream) {
  return launch(select_kernel<kThreads>, params.chunk, kThreads,
                sizeof(typename hopper::TopPlan<kThreads>::Shared), stream,
                params);
}

/// With few queries, all threads of a processor work on one.
cudaError_t launch_top_keys(const hopper::SelectParams& params,
                            cudaStream_t stream) {
  return params.chunk <= processor_count()
             ? launch_top_keys<1024>(params, stream)
             : launch_top_keys<256>(params, stream);
}

template <class Element, int kDepth>
cudaError_t launch_scores(ScoreChunk chunk, cudaStream_t stream) {
  using Plan = SelectPlan<Element, kDepth>;
  chunk.group = Plan::group(chunk.args.heads);
  const int groups = (chunk.chunk + chunk.group - 1) / chunk.group;
  const auto tiles =
      static_cast<int>((chunk.args.keys + Plan::kKeys - 1) / Plan::kKeys);
  chunk.parts = std::clamp((kBlocksEach * processor_count()) / groups, 1,
                           std::max(1, tiles / 4));
  return launch(select_scores_kernel<Element, kDepth>, groups * chunk.parts,
                Plan::kThreads, Plan::shared_bytes(chunk.args.heads), stream,
                chunk);
}

template <class Element>
cudaError_t launch_scores(const ScoreChunk& chunk, cudaStream_t stream) {
  const int dim = chunk.args.head_dim;
  if (dim <= 64) return launch_scores<Element, 64>(chunk, stream);
  return dim <= 128 ? launch_scores<Element, 128>(chunk, stream)
                    : launch_scores<Element, 256>(chunk, stream);
}

size_t shared_bytes(const SelectKeysArgs& args) {
  // Both kinds of elements have two bytes.
  if (args.head_dim <= 64) {
    return SelectPlan<__half, 64>::shared_bytes(args.heads);
  }
  return args.head_dim <= 128
             ? SelectPlan<__half, 128>::shared_bytes(args.heads)
             : SelectPlan<__half, 256>::shared_bytes(args.heads);
}

int64_t stride_of(int64_t keys) {
  return (keys + 255) / 256 * 256;
}

int64_t chunk_of(const KeyScoreArgs& args) {
  const int64_t fit =
      kScratchBytes / 4 / std::max<int64_t>(stride_of(args.keys), 1);
  return std::min({std::max<int64_t>(fit, 1), kMostChunk, args.queries});
}

}  // namespace

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& args) {
  if (auto reason = why_not_score(args)) return reason;
  return why_not_shared(shared_bytes(args));
}

size_t select_keys_workspace(const SelectKeysArgs& args) {
  return static_cast<size_t>(chunk_of(args) * stride_of(args.keys)) * 4;
}

void select_keys(const SelectKeysArgs& args, void* workspace, void* stream) {
  if (args.rows * args.queries * args.slots == 0) return;
  if (const auto reason = why_not_select_keys(args)) {
    throw std::invalid_argument("select_keys: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  const int64_t chunk = chunk_of(args);
  for (int64_t row = 0; row < args.rows; ++row) {
    hopper::SelectParams top{};
    top.queries = static_cast<int>(args.queries);
    top.keys = static_cast<int>(args.keys);
    top.slots = static_cast<int>(args.slots);
    if (args.start.data != nullptr) {
      top.start = args.start.data + row * args.start.row_stride;
      top.end = args.end.data + row * args.end.row_stride;
      top.start_token = args.start.token_stride;
      top.end_token = args.end.token_stride;
    }
    top.indices = args.indices.data + row * args.indices.row_stride;
    top.indices_token = args.indices.token_stride;
    if (args.scores.data != nullptr) {
      top.scores =
          static_cast<float*>(args.scores.data) + row * args.scores.row_stride;
      top.scores_token = args.scores.token_stride;
    }
    top.scratch = static_cast<float*>(workspace);
    top.stride = stride_of(args.keys);
    for (int64_t first = 0; first < args.queries; first += chunk) {
      top.first = static_cast<int>(first);
      top.chunk = static_cast<int>(std::min(chunk, args.queries - first));
      if (args.keys > 0) {
        const ScoreChunk scores{args, row, top.first,   top.chunk,
                                0,    0,   top.scratch, top.stride};
        check_launch("select_keys",
                     args.type == ElementType::bfloat16
                         ? launch_scores<__nv_bfloat16>(scores, on)
                         : launch_scores<__half>(scores, on));
      }
      check_launch("select_keys", launch_top_keys(top, on));
    }
  }
}

std::optional<std::string> why_not_top_keys(const TopKeysArgs& args) {
  if (args.type != ElementType::float32) return "scores are not float32";
  if (!fits_32_bits(args.queries) || !fits_32_bits(args.keys) ||
      !fits_32_bits(args.slots)) {
    return "more than 2^30 queries, keys or slots";
  }
  if (reinterpret_cast<uintptr_t>(args.scores) % 16 != 0 ||
      args.stride % 4 != 0) {
    return "scores are not aligned to 16 bytes";
  }
  return why_not_here();
}

void top_keys(const TopKeysArgs& args, void* stream) {
  if (args.queries * args.slots == 0) return;
  if (const auto reason = why_not_top_keys(args)) {
    throw std::invalid_argument("top_keys: " + *reason);
  }
  hopper::SelectParams params{};
  params.queries = params.chunk = static_cast<int>(args.queries);
  params.keys = static_cast<int>(args.keys);
  params.slots = static_cast<int>(args.slots);
  params.start = args.start;
  params.end = args.end;
  params.start_token = params.end_token = 1;
  params.indices = args.indices;
  params.indices_token = args.slots;
  params.given = static_cast<const float*>(args.scores);
  params.stride = args.stride;
  check_launch("top_keys",
               launch_top_keys(params, static_cast<cudaStream_t>(stream)));
}

}  // namespace longspan::ampere
