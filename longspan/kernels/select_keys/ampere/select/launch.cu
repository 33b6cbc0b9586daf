#include <algorithm>
#include <stdexcept>

#include "longspan/kernels/select_keys/ampere/checks.h"
#include "longspan/kernels/select_keys/ampere/select/scores.cuh"
#include "longspan/kernels/select_keys/ampere/select_keys.h"
#include "longspan/kernels/top_keys/ampere/params.h"

namespace longspan::ampere {

namespace {

/// Scores of a chunk stay in the L2 of large cards until they were selected
/// from.
constexpr int64_t kScratchBytes = 32 << 20;
constexpr int64_t kMostChunk = 4096;
constexpr int kBlocksEach = 8;  // of a processor, so that they end together

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

int64_t chunk_of(const KeyScoreArgs& args) {
  const int64_t fit =
      kScratchBytes / 4 / std::max<int64_t>(score_stride(args.keys), 1);
  return std::min({std::max<int64_t>(fit, 1), kMostChunk, args.queries});
}

}  // namespace

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& args) {
  if (auto reason = why_not_score(args)) return reason;
  return why_not_shared(shared_bytes(args));
}

size_t select_keys_workspace(const SelectKeysArgs& args) {
  return static_cast<size_t>(chunk_of(args) * score_stride(args.keys)) * 4;
}

void select_keys(const SelectKeysArgs& args, void* workspace, void* stream) {
  if (args.rows * args.queries * args.slots == 0) return;
  if (const auto reason = why_not_select_keys(args)) {
    throw std::invalid_argument("select_keys: " + *reason);
  }
  auto* on = static_cast<cudaStream_t>(stream);
  const int64_t chunk = chunk_of(args);
  for (int64_t row = 0; row < args.rows; ++row) {
    TopKeysParams top(args, row);
    top.scratch = static_cast<float*>(workspace);
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
      check_launch("select_keys",
                   launch_top_keys(top, processor_count(), false, on));
    }
  }
}

}  // namespace longspan::ampere
