#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "longspan/kernels/top_keys/ampere/params.h"

namespace longspan::hopper {

/// One row of queries, and those of them whose scores are in scratch at a time.
/// Strides count elements.
struct SelectParams : TopKeysParams {
  int heads;
  const __nv_bfloat16* q;
  int64_t q_token, q_head;
  const __nv_bfloat16* k;
  int64_t k_token;
  const float* weights;
  int64_t weights_token, weights_head;

  SelectParams(const SelectKeysArgs& args, int64_t row)
      : TopKeysParams(args, row),
        heads(static_cast<int>(args.heads)),
        q(static_cast<const __nv_bfloat16*>(args.q.data) +
          row * args.q.row_stride),
        q_token(args.q.token_stride),
        q_head(args.q.head_stride),
        k(static_cast<const __nv_bfloat16*>(args.k.data) +
          row * args.k.row_stride),
        k_token(args.k.token_stride),
        weights(static_cast<const float*>(args.weights.data) +
                row * args.weights.row_stride),
        weights_token(args.weights.token_stride),
        weights_head(args.weights.head_stride) {}
};

/// Scores of a chunk stay for the most part in L2, which has 60 MB, until they
/// are read again. A selection takes as long for few rows as for all that the
/// processors hold: of 65536 keys half as much scratch costs 5 to 12 %.
constexpr int64_t kScratchBytes = 60 << 20;
constexpr int kMostChunk = 4096;

/// Tiles and shared memory of the score kernel: keys are rows, queries and
/// their heads columns. Two warpgroups make products of 64 x 128 each, two at a
/// time: the sums of one (64 registers) are folded over heads where they stand,
/// with weights that stay in 32 registers, while the other is under way. A
/// third warpgroup fetches.
///
/// Per tile of 128 keys and 256 columns: 2 * 128 * 256 * kDim FLOP are 2048
/// cycles at 128 channels. Shared memory is read for 1536 of them by the
/// products and written for 256, so nothing else may read much of it.
template <int kHeads, int kDim>
struct ScorePlan {
  static constexpr int kThreads = 384, kWorkers = 2;
  static constexpr int kKeys = 128, kColumns = 256;
  static constexpr int kQueries = kColumns / kHeads;  // of a block
  static constexpr int kHalfQueries = kQueries / 2;   // of one product
  static constexpr int kBlocks = kDim / 64;           // of channels
  static constexpr int kStages = 4;
  static constexpr uint32_t kQueryBlockBytes = kColumns * 128;
  static constexpr uint32_t kKeyBlockBytes = kKeys * 128;
  static constexpr uint32_t kTileBytes = kBlocks * kKeyBlockBytes;

  /// What a column holds, as query * kHeads + head of a group. Lane c of a quad
  /// gets columns 2 c and 2 c + 1 of every eight: with contents 32 c to 32 c +
  /// 31 of a half there, it can sum over up to 32 heads alone.
  __device__ static constexpr int content(int column) {
    const int i = column % 128;
    return column - i + i % 8 / 2 * 32 + i / 8 * 2 + i % 2;
  }

  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kKey = kBlocks * kQueryBlockBytes;
  static constexpr uint32_t kSmall = kKey + kStages * kTileBytes;
  static constexpr int kMostGroups = kMostChunk / kQueries;

  struct Small {
    uint64_t query_ready, query_free;
    uint64_t key_ready[kStages], key_free[kStages];
    int first_tile[kMostGroups];        // of a group of queries
    int units_before[kMostGroups + 1];  // tiles of all groups before it
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448);
};

template <int kHeads, int kDim>
cudaError_t launch_scores(const SelectParams& params, int processors,
                          bool follows, cudaStream_t stream);

}  // namespace longspan::hopper
