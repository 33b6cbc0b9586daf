#include "longspan/models/deepseek_v4.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "longspan/attention/selected.h"
#include "longspan/comm/collectives.h"
#include "longspan/core/detail/check.h"
#include "longspan/models/detail/norms.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr const char* kDeepseek = "deepseek_v4";

PoolOverlap overlap_of(const Compression& from) {
  return from.values.size(1) == 2 * from.norm.size(0) ? PoolOverlap::previous
                                                      : PoolOverlap::none;
}

void check_compression(const char* name, const Compression& from,
                       int64_t channels, const LayerShare& share) {
  check(from.norm.defined() && from.norm.dim() == 1 &&
            from.norm.size(0) == channels,
        kDeepseek, ": `", name, ".norm` is ",
        from.norm.defined() ? describe(from.norm) : std::string("not there"),
        "; expected [", channels, "]");
  share.check_tokens(kDeepseek, name, from.values, {LayerShare::kAny});
  check(from.values.size(1) == channels || from.values.size(1) == 2 * channels,
        kDeepseek, ": `", name, ".values` is ", describe(from.values),
        "; expected ", channels, " channels, or twice as many with an overlap");
}

void check_tensors(const DeepseekV4Tensors& t, const LayerShare& share,
                   const DeepseekV4Options& options) {
  const int64_t any = LayerShare::kAny;
  share.check_tokens(kDeepseek, "q", t.q, {any, any});
  share.check_tokens(kDeepseek, "kv", t.kv, {t.q.size(2)});
  check(
      t.sinks.defined() && t.sinks.dim() == 1 && t.sinks.size(0) == t.q.size(1),
      kDeepseek, ": `sinks` is ",
      t.sinks.defined() ? describe(t.sinks) : std::string("not there"),
      "; expected [", t.q.size(1), "]");
  check(options.window >= 1, kDeepseek, ": `window` is ", options.window,
        "; expected at least 1");
  if (!t.pools) {
    check(!t.index_pools, kDeepseek, ": got index_pools without pools");
    return;
  }
  check(options.ratio >= 1, kDeepseek, ": `ratio` is ", options.ratio,
        "; pools have at least 1 token");
  check_compression("pools", *t.pools, t.kv.size(1), share);
  if (!t.index_pools) return;
  check(options.slots >= 1, kDeepseek, ": `slots` is ", options.slots,
        "; expected at least 1");
  share.check_tokens(kDeepseek, "index_q", t.index_q, {any, any});
  share.check_tokens(kDeepseek, "index_weights", t.index_weights,
                     {t.index_q.size(1)});
  check_compression("index_pools", *t.index_pools, t.index_q.size(2), share);
  check(overlap_of(*t.index_pools) == overlap_of(*t.pools), kDeepseek,
        ": `pools` and `index_pools` are not pools of the same tokens: one of "
        "them looks at the window before its own");
}

/// All pools of the stream, as keys.
at::Tensor pools_of(const Compression& from, const LayerShare& share,
                    const DeepseekV4Options& options) {
  const LayerShare::Pools& pools = share.pools(options.ratio, overlap_of(from));
  const at::Tensor made =
      rms_normed(pool_tokens(from.values, from.gates, from.bias, pools.tables,
                             share.group()),
                 from.norm, options.eps);
  const RotaryAngles angles =
      rotary_angles(pools.positions, options.rotary, made.scalar_type());
  return gather_pools(rotated(made, angles, RotaryPlace::last), pools.plan,
                      pools.tables, share.group());
}

/// The pools that the indexer selects from those that ended; int32.
at::Tensor selected(const DeepseekV4Tensors& t, const RotaryAngles& angles,
                    const LayerShare& share, const DeepseekV4Options& options) {
  const at::NoGradGuard without_gradients;
  const LayerShare::Pools& pools =
      share.pools(options.ratio, overlap_of(*t.index_pools));
  const at::Tensor keys = pools_of(*t.index_pools, share, options);
  const at::Tensor q = rotated(t.index_q, angles, RotaryPlace::last);
  return select_keys(q, keys, t.index_weights,
                     {.slots = std::min(options.slots, pools.plan.total()),
                      .start = pools.start,
                      .end = pools.end})
      .indices;
}

}  // namespace

at::Tensor deepseek_v4(const DeepseekV4Tensors& tensors,
                       const LayerShare& share,
                       const DeepseekV4Options& options) {
  check_tensors(tensors, share, options);
  const RotaryAngles angles =
      rotary_angles(share.positions(), options.rotary, tensors.q.scalar_type());
  const at::Tensor q = rotated(tensors.q, angles, RotaryPlace::last);
  const at::Tensor own = rotated(tensors.kv, angles, RotaryPlace::last);
  const LayerShare::Halo& halo = share.halo(options.window - 1);
  at::Tensor rows =
      at::cat({own, exchange_needed(own, 0, halo.sends, share.group())});
  at::Tensor lists = halo.seen;
  if (tensors.pools) {
    const LayerShare::Pools& plan =
        share.pools(options.ratio, overlap_of(*tensors.pools));
    const at::Tensor pools = pools_of(*tensors.pools, share, options);
    // Documents may all be too short for one.
    if (plan.plan.total() > 0) {
      const at::Tensor seen = tensors.index_pools
                                  ? selected(tensors, angles, share, options)
                                  : plan.ended;
      lists = at::cat(
          {lists, at::where(seen < 0, seen, seen + rows.size(0)).to(at::kInt)},
          1);
    }
    rows = at::cat({rows, pools});
  }
  const at::Tensor out =
      attend_selected(
          q, rows, lists,
          {.scale = options.scale.value_or(
               1 / std::sqrt(static_cast<double>(tensors.q.size(2)))),
           .sink = tensors.sinks})
          .out;
  return rotated(out, angles, RotaryPlace::last, RotaryTurn::back);
}

}  // namespace longspan
