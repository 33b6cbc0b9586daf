#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "longspan/kernels/attention/hopper/records.cuh"
#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// Where gradients of keys or values go. Strides count elements.
struct GradientPlace {
  void* data;  // of the type of q, or float where is_float
  int64_t row, token, head;
  int channels;
  bool is_float;
  bool adds;       // to the floats that are there
  bool is_shared;  // others add to them at the same time
};

/// A number for each query and head.
struct QueryNumbers {
  const float* data;
  int64_t row, token, head;
};

/// What the kernel that makes dk and dv is told. Strides count elements.
struct DenseKeysParams {
  CUtensorMap q, dout, k, v;
  CUtensorMap dq;  // floats, added to in any order; where it makes dq too
  int* next_item;  // counted up by the blocks, from 0
  const WorkBlock* blocks;
  const WorkPart* parts;
  const WorkKeyLine* lines;
  int block_count, queries, heads, key_heads;
  int apart;  // so many of the first blocks are dealt head by head
  int section_heads, section_key_heads;  // that are dealt block by block
  int heads_per_key_head, head_offset;
  float scale;    // of a product, natural
  float softcap;  // 0: none
  QueryNumbers lse, delta;
  GradientPlace dk, dv;
  // Where dq is added up in the order of the table, and what heads that share
  // keys add to dk and dv in the order of heads; or null.
  const WorkTurn* turns;
  int* added;  // [heads][blocks]: kNever less the column from which on all is
  int* heads_added;  // [key_heads][apart]: warps that have

  __host__ __device__ int items() const {
    return apart * heads + (block_count - apart) * key_heads;
  }
};

/// The turn of a part of a block.
struct TurnRecord {
  int block;
  WorkTurn turn;   // hands_on: of the last part
  int still_from;  // later parts add up to here; 0: there are none
};

/// What the kernels that make dk and dv keep beside their tiles.
template <int kStages, int kRecords, int kQueries>
struct KeysSmall {
  uint64_t keys_ready, keys_free;  // and values
  uint64_t query_ready[kStages], query_free[kStages];
  uint64_t dout_ready[kStages], dout_free[kStages];
  uint64_t record_ready[kRecords], record_free[kRecords];
  uint64_t sums_ready, sums_free;  // dq of a tile
  // Of the queries of a tile: lse in powers of two, infinite for those that saw
  // nothing; and delta, times the scale where slopes have it.
  float lse[kStages][kQueries], delta[kStages][kQueries];
  WorkRecord record[kRecords];
  TurnRecord turn[kRecords];
};

/// Tiles and shared memory of the kernel that makes dk and dv.
///
/// A block of threads takes 128 keys of a key head, 64 for each of two
/// warpgroups, which hold the sums of dk and dv in registers; it walks over the
/// queries in tiles of 64, the last ones first, and for each tile over all
/// heads that use these keys: nothing is added up in memory. Scores are kept
/// transposed, a row for each key, so that weights and their derivatives are
/// operands in registers.
///
/// It also makes dq (kWithQueries). The derivatives of scores pass through
/// shared memory, each warpgroup makes half of the channels, and the copy
/// engine adds them to device memory: in the order in which blocks come, or in
/// turn. Heads come one after another: many blocks that add to the same queries
/// at once would wait for one another. Blocks that see many queries are dealt
/// head by head: those of a few heads at a time are what L2 holds, q, dout and
/// dq of 16384 tokens and 128 channels being 16 MiB. Their dk and dv are then
/// added up in memory too.
template <int kHeadDim_, int kValueDim_, bool kSoftcap_,
          ElementType kType_ = ElementType::bfloat16>
struct DenseKeysPlan {
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr bool kSoftcap = kSoftcap_, kWithQueries = true;
  static constexpr int kKeys = 128, kQueries = 64;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int kHeadBlocks = kHeadDim / 64;  // of 64 channels
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr uint32_t kKeyBlock = kKeys * 128;  // bytes
  static constexpr uint32_t kQueryBlock = kQueries * 128;
  static constexpr uint32_t kKeyBytes = kHeadBlocks * kKeyBlock;
  static constexpr uint32_t kValueBytes = kValueBlocks * kKeyBlock;
  static constexpr uint32_t kQueryBytes = kHeadBlocks * kQueryBlock;
  static constexpr uint32_t kDoutBytes = kValueBlocks * kQueryBlock;
  static constexpr int kStages = 2;
  static constexpr uint32_t kKey = 0;
  static constexpr uint32_t kValue = kKey + kKeyBytes;
  static constexpr uint32_t kQuery = kValue + kValueBytes;
  static constexpr uint32_t kDout = kQuery + kStages * kQueryBytes;
  // Derivatives of scores, of two tiles; dq of one, in boxes of 32 channels.
  static constexpr uint32_t kSlopeBytes = 64 * 128;  // of a warpgroup
  static constexpr uint32_t kSlopes = kDout + kStages * kDoutBytes;
  static constexpr int kBoxes = kHeadDim / 32;
  static constexpr uint32_t kBoxBytes = kQueries * 128;
  static constexpr uint32_t kSums = kSlopes + 2 * 2 * kSlopeBytes;
  static constexpr uint32_t kSmall = kSums + kBoxes * kBoxBytes;
  static constexpr int kRecords = 4;

  using Small = KeysSmall<kStages, kRecords, kQueries>;
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448 - 1024);
};

template <class Plan>
cudaError_t launch_dense_keys(const DenseKeysParams& params, int processors,
                              cudaStream_t stream);

/// Tiles and shared memory of that kernel for more channels: dk and dv of 64
/// keys fill the registers of a warpgroup each, so one of them makes dv and the
/// other dk, and both score.
template <int kHeadDim_, int kValueDim_, bool kSoftcap_,
          ElementType kType_ = ElementType::bfloat16>
struct WideKeysPlan {
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static_assert(kHeadDim == kValueDim);
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr bool kSoftcap = kSoftcap_, kWithQueries = false;
  static constexpr int kKeys = 64, kQueries = 64;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int kHeadBlocks = kHeadDim / 64;  // of 64 channels
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr uint32_t kKeyBlock = kKeys * 128;  // bytes
  static constexpr uint32_t kQueryBlock = kQueries * 128;
  static constexpr uint32_t kKeyBytes = kHeadBlocks * kKeyBlock;
  static constexpr uint32_t kValueBytes = kValueBlocks * kKeyBlock;
  static constexpr uint32_t kQueryBytes = kHeadBlocks * kQueryBlock;
  static constexpr uint32_t kDoutBytes = kValueBlocks * kQueryBlock;
  static constexpr int kStages = 2;
  static constexpr uint32_t kKey = 0;
  static constexpr uint32_t kValue = kKey + kKeyBytes;
  static constexpr uint32_t kQuery = kValue + kValueBytes;
  static constexpr uint32_t kDout = kQuery + kStages * kQueryBytes;
  static constexpr uint32_t kSmall = kDout + kStages * kDoutBytes;
  static constexpr int kRecords = 4;
  using Small = KeysSmall<kStages, kRecords, kQueries>;
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448 - 1024);
};

template <class Plan>
cudaError_t launch_wide_keys(const DenseKeysParams& params, int processors,
                             cudaStream_t stream);

/// What the kernel that makes dq is told.
struct DenseQueriesParams {
  CUtensorMap q, dout, k, v;
  int* next_item;  // counted up by the blocks, from 0
  const WorkBlock* blocks;
  const WorkPart* parts;
  const WorkLine* lines;
  int block_count, heads, section_heads;
  int heads_per_key_head, head_offset;
  float scale;    // of a product, natural
  float softcap;  // 0: none
  QueryNumbers lse, delta;
  GradientPlace dq;
};

/// Tiles and shared memory of that kernel, above 128 channels: like those of
/// the forward kernel, with dout beside the queries.
template <int kHeadDim_, int kValueDim_, bool kSoftcap_,
          ElementType kType_ = ElementType::bfloat16>
struct DenseQueriesPlan {
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kQueries = 128, kKeys = 64;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kHeadBlocks = kHeadDim / 64;  // of 64 channels
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr uint32_t kQueryBlock = kQueries * 128;  // bytes
  static constexpr uint32_t kKeyBlock = kKeys * 128;
  static constexpr uint32_t kQueryBytes = kHeadBlocks * kQueryBlock;
  static constexpr uint32_t kDoutBytes = kValueBlocks * kQueryBlock;
  static constexpr uint32_t kKeyBytes = kHeadBlocks * kKeyBlock;
  static constexpr uint32_t kValueBytes = kValueBlocks * kKeyBlock;
  static constexpr int kStages = 1;
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kDout = kQuery + kQueryBytes;
  static constexpr uint32_t kKey = kDout + kDoutBytes;
  static constexpr uint32_t kValue = kKey + kStages * kKeyBytes;
  static constexpr uint32_t kSmall = kValue + kStages * kValueBytes;
  static constexpr int kRecords = 4;

  struct Small {
    uint64_t query_ready, query_free;  // and dout
    uint64_t key_ready[kStages], key_free[kStages];
    uint64_t value_ready[kStages], value_free[kStages];
    uint64_t record_ready[kRecords], record_free[kRecords];
    WorkRecord record[kRecords];
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448 - 1024);
};

template <class Plan>
cudaError_t launch_dense_queries(const DenseQueriesParams& params,
                                 int processors, cudaStream_t stream);

/// Calls body<kDim, kSoftcap>() with the channels of the plan that takes so
/// many.
template <class Body>
auto with_backward_dims(int head_dim, int value_dim, bool softcap,
                        const Body& body) {
  const auto with = [&]<int kDim>() {
    return softcap ? body.template operator()<kDim, true>()
                   : body.template operator()<kDim, false>();
  };
  const int most = head_dim > value_dim ? head_dim : value_dim;
  if (most <= 64) return with.template operator()<64>();
  if (most <= 128) return with.template operator()<128>();
  if (most <= 256) return with.template operator()<256>();
  return with.template operator()<512>();
}

}  // namespace longspan::hopper
