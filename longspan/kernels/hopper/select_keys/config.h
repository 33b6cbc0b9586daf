#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace longspan::hopper {

/// One row of queries, and those of them whose scores are in scratch at a time.
/// Strides count elements.
struct SelectParams {
  int queries, keys, heads, slots;
  const __nv_bfloat16* q;
  int64_t q_token, q_head;
  const __nv_bfloat16* k;
  int64_t k_token;
  const float* weights;
  int64_t weights_token, weights_head;
  const int32_t *start, *end;  // both null: all keys
  int64_t start_token, end_token;
  int32_t* indices;
  int64_t indices_token;
  float* scores;  // of the chosen; null: not wanted
  int64_t scores_token;
  float* scratch;      // [chunk, stride] scores
  const float* given;  // scores of all queries; null: they are in scratch
  int64_t stride;      // a multiple of 4
  int first, chunk;    // queries [first, first + chunk)
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

/// The selection, one row a block. kMost scores of a row are looked at in
/// shared memory; few threads a block leave room for four blocks a processor.
template <int kBlockThreads>
struct TopPlan {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kMost = kThreads > 512 ? 8192 : 5120;
  static constexpr int kSample = 4096;  // of a row that is longer than kMost
  static constexpr int kBins = 2048;

  struct Shared {
    uint32_t key[kMost];
    int place[kMost];
    uint32_t histogram[kBins];
    uint32_t warp_total[2][32];
    uint32_t low[32], high[32];
    uint32_t digit, rank, in_bin;
    uint32_t few_count, few[32];
  };
};

template <int kHeads, int kDim>
cudaError_t launch_scores(const SelectParams& params, int processors,
                          bool follows, cudaStream_t stream);

}  // namespace longspan::hopper
