#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan {

/// How far rows of scores in scratch are apart.
inline int64_t score_stride(int64_t keys) {
  return (keys + 255) / 256 * 256;
}

/// The selection for some queries of one row. Strides count elements.
struct TopKeysParams {
  int queries, keys, slots;
  const int32_t *start, *end;  // both null: all keys
  int64_t start_token, end_token;
  int32_t* indices;
  int64_t indices_token;
  float* scores = nullptr;  // of the chosen; null: not wanted
  int64_t scores_token = 0;
  float* scratch = nullptr;      // [chunk, stride] scores
  const float* given = nullptr;  // of all queries; null: they are in scratch
  int64_t stride;                // a multiple of 4
  int first = 0, chunk = 0;      // queries [first, first + chunk)

  /// Of scores that wait in scratch, which the caller names.
  TopKeysParams(const SelectKeysArgs& args, int64_t row)
      : queries(static_cast<int>(args.queries)),
        keys(static_cast<int>(args.keys)),
        slots(static_cast<int>(args.slots)),
        start(args.start.data),
        end(args.end.data),
        start_token(args.start.token_stride),
        end_token(args.end.token_stride),
        indices(args.indices.data + row * args.indices.row_stride),
        indices_token(args.indices.token_stride),
        stride(score_stride(args.keys)) {
    if (start != nullptr) {
      start += row * args.start.row_stride;
      end += row * args.end.row_stride;
    }
    if (args.scores.data != nullptr) {
      scores =
          static_cast<float*>(args.scores.data) + row * args.scores.row_stride;
      scores_token = args.scores.token_stride;
    }
  }

  /// Of given scores.
  explicit TopKeysParams(const TopKeysArgs& args)
      : queries(static_cast<int>(args.queries)),
        keys(static_cast<int>(args.keys)),
        slots(static_cast<int>(args.slots)),
        start(args.start),
        end(args.end),
        start_token(1),
        end_token(1),
        indices(args.indices),
        indices_token(args.slots),
        given(static_cast<const float*>(args.scores)),
        stride(args.stride),
        chunk(queries) {}
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

/// Selects for the chunk. When it `follows` a launch of ours, it may begin
/// before that one is done.
cudaError_t launch_top_keys(const TopKeysParams& params, int processors,
                            bool follows, cudaStream_t stream);

}  // namespace longspan
