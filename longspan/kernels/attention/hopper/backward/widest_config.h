#pragma once

#include <type_traits>

#include "longspan/kernels/attention/hopper/backward/config.h"

namespace longspan::hopper {

enum class Derivative { of_queries, of_keys, of_values };

/// Tiles and shared memory of the kernels for up to 512 channels, one for each
/// derivative.
///
/// The sums of 64 rows (queries for dq, else keys) fill the registers of both
/// warpgroups, half of the channels in each. The block walks over the columns
/// that its rows see in tiles of 64. A warpgroup scores all rows with 32 of
/// them; what becomes of the scores passes through shared memory, so that each
/// sums over all 64: nothing is scored twice in a kernel. With scores made anew
/// for each derivative these are eight products in place of five, of which none
/// is added up in memory: the same bits every time.
///
/// Rows (q and dout, k and v, or k) stay for the whole item. Of the columns,
/// those that are scored and then summed (k, q) have one slot, and the others
/// (v, dout) arrive by blocks of 64 channels while that slot is filled. For dv
/// the columns that are summed are dout, and have a slot of their own.
template <Derivative kMakes_, bool kSoftcap_,
          ElementType kType_ = ElementType::bfloat16>
struct WidestPlan {
  static constexpr Derivative kMakes = kMakes_;
  static constexpr ElementType kType = kType_;  // of operands
  static constexpr bool kSoftcap = kSoftcap_, kWithQueries = false;
  static constexpr bool kByKeys = kMakes != Derivative::of_queries;
  static constexpr bool kSlopes = kMakes != Derivative::of_values;
  static constexpr int kHeadDim = 512, kKeys = 64, kQueries = 64;
  static constexpr int kColumns = 64;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int kMyColumns = kColumns / 2, kMyDim = kHeadDim / 2;
  static constexpr int kBlocks = kHeadDim / 64;  // of 64 channels
  static constexpr uint32_t kBlock = 64 * 128;   // bytes
  static constexpr uint32_t kTile = kBlocks * kBlock;
  // Slots of values, and how many blocks each of them holds.
  static constexpr int kSlots = kSlopes ? 3 : 1;
  static constexpr int kSlotBlocks = kSlopes ? 1 : kBlocks;
  // Scores that are written may still be read where only values make them wait.
  static constexpr int kPairSlots = kSlopes ? 1 : 2;
  static constexpr uint32_t kRow = 0;
  static constexpr uint32_t kRowValue = kRow + kTile;
  static constexpr uint32_t kColumn = kSlopes ? kRowValue + kTile : kRowValue;
  static constexpr uint32_t kValue = kColumn + kTile;
  static constexpr uint32_t kPairs = kValue + kSlots * kSlotBlocks * kBlock;
  static constexpr uint32_t kSmall = kPairs + kPairSlots * kBlock;
  // What is summed with the scores.
  static constexpr uint32_t kSummed = kSlopes ? kColumn : kValue;
  static constexpr int kStages = 1, kRecords = 2;

  using Params =
      std::conditional_t<kByKeys, DenseKeysParams, DenseQueriesParams>;
  struct Small {
    uint64_t rows_ready, rows_free;
    uint64_t column_ready[kStages], column_free[kStages];
    uint64_t value_ready[kSlots], value_free[kSlots];
    uint64_t record_ready[kRecords], record_free[kRecords];
    // Of queries that are columns, as in KeysSmall.
    float lse[kStages][kColumns], delta[kStages][kColumns];
    WorkRecordOf<64> record[kRecords];
    // How many tiles are left when scores are not finite, by turns.
    int spoiled_at[2];
  };
  static constexpr uint32_t kSharedBytes = kSmall + sizeof(Small);
  static_assert(kSharedBytes <= 232448 - 1024);
};

template <class Plan>
cudaError_t launch_widest(const typename Plan::Params& params, int processors,
                          cudaStream_t stream);

}  // namespace longspan::hopper
