#pragma once

#include <ATen/core/Tensor.h>

namespace longspan {

/// Compressed keys, which lie behind the others: pool p stands for tokens
/// [p * ratio, (p + 1) * ratio) and is key `keys` + p.
struct Pools {
  int64_t count = 0;
  int64_t ratio = 0;       ///< tokens in a pool; not asked where `chosen` tells
  at::Tensor chosen = {};  ///< [.., T, slots]: pools of each query, -1 = none;
                           ///< undefined: all that end at or before the query
};

/// The keys of each query, as attend_selected takes them: a sliding window, and
/// compressed keys behind it.
///
/// queries, int32 or int64 [.., T], say which token of the whole stream each
/// query is. The first min(keys, window) slots are the tokens from
/// max(query - window + 1, 0) to the query itself; pools.count more (or as many
/// as chosen has) are pools. Lists [.., T, slots] are of the type of queries; a
/// slot without a key is -1, also where a token or a pool is beyond what is
/// there. Nothing is read back to the host.
///
/// torch.ops.longspan.window_lists(queries, keys, window, pools, ratio, chosen)
at::Tensor window_lists(const at::Tensor& queries, int64_t keys, int64_t window,
                        const Pools& pools = {});

/// How many pools end at or before each query: floor((query + 1) / ratio). What
/// select_keys and index_scores take as the end of a query's window.
///
/// torch.ops.longspan.ended_pools(queries, ratio)
at::Tensor ended_pools(const at::Tensor& queries, int64_t ratio);

/// The lists with -1 where a mask hides the key: [B, T, slots] and a mask
/// [B, T, keys], false or below 0 = hidden; one row of the mask serves all.
/// Slots outside the mask are -1 too.
///
/// torch.ops.longspan.hide_listed(lists, mask)
at::Tensor hide_listed(const at::Tensor& lists, const at::Tensor& mask);

}  // namespace longspan
