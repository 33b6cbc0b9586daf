#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// What a launch of dense forward attention is told. Strides count elements.
struct DenseForwardParams {
  CUtensorMap q, k, v;
  int* next_item;  // counted up by the blocks, from 0
  const WorkBlock* blocks;
  const WorkPart* parts;
  const WorkLine* lines;
  int block_count, heads, section_heads;
  int heads_per_key_head, head_offset;
  int packed_heads, token_bits;  // of a block: it has 2^token_bits queries
  int value_dim;
  float scale;        // of a product, natural
  float softcap;      // 0: none
  const float* sink;  // [heads], natural; null: none
  void* out;          // of the type of q, or float where out_is_float
  int64_t out_row, out_token, out_head;
  float* lse;
  int64_t lse_row, lse_token, lse_head;
  bool out_is_float;
  const float* before;  // out of earlier keys, whose lse is there; or null
  int64_t before_row, before_token, before_head;
};

/// Tiles and shared memory of the forward kernel.
///
/// A block of threads takes 128 queries of a head, 64 for each of two
/// warpgroups, and their keys in tiles of kKeys. One thread of a third
/// warpgroup asks the copy engine for queries, keys and values; one warp deals
/// the work and says who sees what; two look through values.
///
/// At 128 channels a tile is 2048 cycles of the tensor cores and 1024 of
/// exponentials; one warpgroup's exponentials run under the other's products.
/// Nothing makes them: each asks for products as soon as it has weights, which
/// was measured to be faster than turns.
/// Above 256 channels widest_config.h has another plan.
///
/// Where queries see few keys, `kNarrow`, rows of a block are as many heads of
/// a key head as there are, up to 8, and few queries of each, head after head:
/// 16 queries of 8 heads see 143 keys of a window of 128, where 128 queries see
/// 255. Tiles of 48 keys take them as 144. Such an item is short: 1152 cycles
/// of the tensor cores at 64 channels, as many of exponentials, some 2300 to
/// issue everything, but over 3000 from its record to its answer, in steps that
/// wait for one another. So a processor has several under way, by as many
/// blocks of threads as its registers hold: 2 of two warpgroups at 64 channels,
/// 2 of one at 128.
template <int kHeadDim_, int kValueDim_, bool kNarrow_ = false,
          ElementType kType_ = ElementType::bfloat16>
struct DenseForwardPlan {
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr bool kNarrow = kNarrow_;
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr int kWarpgroups = kNarrow && kValueDim > 64 ? 1 : 2;
  static constexpr int kBlocks = kNarrow ? 2 : 1;    // of a processor
  static constexpr int kQueries = 64 * kWarpgroups;  // rows
  static constexpr int kKeys = kNarrow ? 48 : kHeadDim > 192 ? 64 : 128;
  static constexpr int kValueKeys = kKeys;  // in a box of values
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerWarps = 4 * kWarpgroups;
  static constexpr int kConsumerRegisters = kNarrow
                                                ? (kWarpgroups == 1 ? 216 : 104)
                                            : kValueDim > 128 ? 240
                                                              : 232;
  static constexpr int kProducerRegisters = kNarrow
                                                ? (kWarpgroups == 1 ? 40 : 32)
                                            : kValueDim > 128 ? 24
                                                              : 40;
  static constexpr int kHeadBlocks = kHeadDim / 64;  // of 64 channels
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr uint32_t kQueryBlock = kQueries * 128;  // bytes
  static constexpr uint32_t kKeyBlock = kKeys * 128;
  static constexpr uint32_t kQueryBytes = kHeadBlocks * kQueryBlock;
  static constexpr uint32_t kKeyBytes = kHeadBlocks * kKeyBlock;
  static constexpr uint32_t kValueBytes = kValueBlocks * kKeyBlock;
  static constexpr int kStages = kNarrow ? 3 : 2;
  // The next queries arrive while the last products run, where there is room.
  static constexpr int kQueryStages = kHeadDim <= 128 ? 2 : 1;
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kKey = kQueryStages * kQueryBytes;
  static constexpr uint32_t kValue = kKey + kStages * kKeyBytes;
  static constexpr uint32_t kSmall = kValue + kStages * kValueBytes;

  static constexpr int kRecords = 4;

  struct Small {
    uint64_t query_ready[2], query_free[2];
    uint64_t key_ready[kStages], key_free[kStages];
    uint64_t value_ready[kStages], value_free[kStages];
    uint64_t value_searched[kStages];
    int spoiled[kStages][2];  // whether either warp found any
    uint64_t record_ready[kRecords], record_free[kRecords];
    WorkRecordOf<kQueries> record[kRecords];
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kBlocks * (kSharedBytes + 1024) <= 233472 - 1024);
};

template <class Plan>
cudaError_t launch_dense_forward(const DenseForwardParams& params,
                                 int processors, cudaStream_t stream);

}  // namespace longspan::hopper
