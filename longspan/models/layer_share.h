#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "longspan/attention/pool_tokens.h"
#include "longspan/comm/group.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/halo_plan.h"
#include "longspan/plan/pool_plan.h"
#include "longspan/plan/state_plan.h"

namespace longspan {

struct RunChunks;

/// This rank's share of one stream of documents, as layers of models take it:
/// owners, documents and ranks, and the plans that layers need, each made when
/// it is first asked for and kept.
///
/// Made once a batch; copies share the plans. It belongs to one rank: ranks
/// that are threads make one each. Tensors of tokens are [tokens, ..] in local
/// order, on the device of the share.
class LayerShare {
 public:
  /// One causal mask, over as many ranks as the group has. Recurrences know
  /// nothing but documents, so masks with a window, groups or hidden tokens are
  /// refused: layers have their own windows, and pads belong into the packing.
  LayerShare(AttentionLayout layout, Group group, at::Device device = at::kCPU);

  const AttentionLayout& layout() const;
  const Group& group() const;
  at::Device device() const;

  /// Tokens of this rank, pads included.
  int64_t tokens() const;

  /// Of each token its position in its document, 0 for pads: int64 [tokens].
  const at::Tensor& positions() const;

  /// Which tokens are no pads: bool [tokens].
  const at::Tensor& real() const;
  bool has_pads() const;

  /// The tokens before each run, and what a window of count + 1 tokens shows.
  struct Halo {
    HaloPlan plan;
    at::Tensor sends = {};  ///< as exchange_needed takes them
    at::Tensor seen = {};   ///< int32 [tokens, count + 1], as HaloPlan::seen()
  };
  const Halo& halo(int64_t count) const;

  struct Pools {
    PoolPlan plan;
    PoolTables tables = {};
    at::Tensor positions = {};  ///< int64 [pools here]: of their first tokens
    at::Tensor start = {};      ///< int32 [tokens]: the pools that have ended,
    at::Tensor end = {};        ///< [start, end)
    at::Tensor ended = {};      ///< the same as lists: int32 [tokens, most], -1
  };
  const Pools& pools(int64_t ratio, PoolOverlap overlap) const;

  /// Runs cut into chunks of at most so many tokens (models/detail). States
  /// travel in the way that takes less for pairs of this weight.
  const RunChunks& chunks(int64_t most, const StatePair& pair) const;

  /// Refuses tensors that are not of this share: floating [tokens, ..], with
  /// as many axes more as there are `sizes`, each of which is checked unless
  /// it is kAny.
  static constexpr int64_t kAny = -1;
  void check_tokens(const char* who, const char* name, const at::Tensor& x,
                    at::IntArrayRef sizes) const;

 private:
  struct Plans;
  std::shared_ptr<Plans> plans_;
};

}  // namespace longspan
