#pragma once

#include "longspan/kernels/attention/hopper/forward/config.h"

namespace longspan::hopper {

/// Tiles and shared memory of the forward kernel for up to 512 channels.
///
/// The sums of 64 queries, 64 x 512 floats, are half of a processor's
/// registers: two warpgroups hold half of the value channels each. They take
/// turns to score a tile of 64 keys, one the even tiles of a block of queries
/// and the other the odd ones. Its weights go to the other through shared
/// memory, with the greatest score so far; both then multiply them with their
/// half of the values, the owner from registers. One weighs under products of
/// the other:
///
/// ```
/// even  S0  weigh 0          0 V, S2           1 V, weigh 2  2 V, S4
/// odd   S1           0 V, weigh 1  1 V, S3           2 V, weigh 3  3 V, S5
/// ```
///
/// A tile in cycles. Tensor cores: 1024 for scores and 512 for either half of
/// the values, 2048 in all; weighing (256 of exponentials, some 700 from the
/// last score to the weights) is hidden. Shared memory: 128 KiB are read for
/// scores, 32 and 40 for values, and 128 arrive; 328 KiB are 2624 cycles at 128
/// bytes each. L2: 128 KiB of keys and values are 3280 cycles at the 40 bytes a
/// processor gets when all of them ask. That binds, so copies must never pause:
/// keys and values share one ring of slots, in the order of their use, which
/// are given back one by one.
///
/// A slot is 64 keys x 128 channels, or 32 keys x 256 channels of values: all
/// that a product of one warpgroup is wide. No slot has two readers.
template <ElementType kType_ = ElementType::bfloat16>
struct WidestForwardPlan {
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr int kHeadDim = 512, kValueDim = 512;
  static constexpr int kQueries = 64, kKeys = 64;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kMyValueDim = kValueDim / 2;
  static constexpr int kHeadBlocks = kHeadDim / 64;  // of 64 channels

  static constexpr int kSlots = 9;
  static constexpr uint32_t kSlot = 16 << 10;  // bytes
  static constexpr int kKeyPieces = 4;         // slots of a tile's keys
  static constexpr int kValuePieces = 4;       // two for each half
  // Blocks of 64 channels in a slot of keys, in bytes and how many.
  static constexpr uint32_t kKeyBlock = kKeys * 128;
  static constexpr int kKeyBlocks = kSlot / kKeyBlock;
  // Likewise of values, whose slots hold fewer keys and more channels.
  static constexpr int kValueKeys = 32;
  static constexpr uint32_t kValueBlock = kValueKeys * 128;
  static constexpr int kValueBlocks = kSlot / kValueBlock;
  static_assert(kKeyPieces * kKeyBlocks == kHeadBlocks);
  static_assert(kValueBlocks * 64 == kMyValueDim);

  static constexpr uint32_t kQueryBlock = kQueries * 128;
  static constexpr uint32_t kQueryBytes = kHeadBlocks * kQueryBlock;
  static constexpr uint32_t kQuery = 0;
  static constexpr uint32_t kRing = kQuery + kQueryBytes;
  static constexpr uint32_t kWeights = kRing + kSlots * kSlot;
  static constexpr uint32_t kSmall = kWeights + kQueries * 128;

  static constexpr int kRecords = 4;

  struct Small {
    uint64_t query_ready, query_free;
    // A warpgroup waits for each fill of the slots that are its own and for no
    // other, so it has a barrier of its own to count them with.
    uint64_t slot_ready[2][kSlots], slot_free[kSlots];
    uint64_t record_ready[kRecords], record_free[kRecords];
    float high[2][kQueries];    // after the last even and the last odd tile
    float sum[2][2][kQueries];  // by turns; of either warpgroup
    WorkRecordOf<kQueries> record[kRecords];
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448 - 1024);
};

template <>
cudaError_t launch_dense_forward<WidestForwardPlan<>>(
    const DenseForwardParams& params, int processors, cudaStream_t stream);
template <>
cudaError_t launch_dense_forward<WidestForwardPlan<ElementType::float16>>(
    const DenseForwardParams& params, int processors, cudaStream_t stream);

}  // namespace longspan::hopper
