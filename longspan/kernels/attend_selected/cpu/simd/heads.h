#pragma once

#include "longspan/kernels/attend_selected/cpu/steps.h"
#include "longspan/kernels/common/cpu/simd/pack.h"

/// Where the heads and the keys of one query lie.
namespace longspan {
namespace {

inline int64_t heads_per_key_head(const SelectedAttentionArgs& args) {
  return args.heads / args.key_heads;
}

/// Up to kBlock query heads of a key head.
struct HeadPanel {
  int64_t first;  // query head
  int count;
};

inline int head_panels(const SelectedAttentionArgs& args) {
  return static_cast<int>((heads_per_key_head(args) + kBlock - 1) / kBlock);
}

inline HeadPanel panel_of(const SelectedAttentionArgs& args, int64_t key_head,
                          int panel) {
  const int64_t heads = heads_per_key_head(args);
  const int64_t first = static_cast<int64_t>(panel) * kBlock;
  const int64_t left = heads - first;
  return {key_head * heads + first,
          static_cast<int>(left < kBlock ? left : kBlock)};
}

/// Listed keys from `first` on, as many as a block holds.
inline int keys_in_block(const SelectedKeys& list, int64_t first, int block) {
  const int64_t left = list.count - first;
  return static_cast<int>(left < block ? left : block);
}

template <class Element>
inline const Element* key_row(const SelectedAttentionArgs& args,
                              const SelectedKeys& list, int64_t i) {
  return place_in<const Element>(args.kv, list.row, list.keys[i],
                                 list.key_head);
}

/// Asks for the rows of listed keys [begin, end), those there are.
template <class Element>
void prefetch_listed(const SelectedAttentionArgs& args,
                     const SelectedKeys& list, int64_t begin, int64_t end) {
  constexpr int kLine = 64 / sizeof(Element);
  end = end < list.count ? end : list.count;
  for (int64_t i = begin; i < end; ++i) {
    const Element* row = key_row<Element>(args, list, i);
    for (int c = 0; c < args.head_dim; c += kLine) {
      __builtin_prefetch(row + c, 0, 2);
    }
  }
}

/// The lse of a panel's heads; those where it is infinite are not alive, nor
/// are those that the last vector has left.
template <class T>
struct HeadFacts {
  T lse[kBlock], alive[kBlock];

  HeadFacts(const TokenArray<const void*>& array, const SelectedKeys& list,
            const HeadPanel& panel) {
    for (int h = 0; h < kBlock; ++h) {
      lse[h] = alive[h] = 0;
      if (h >= panel.count) continue;
      const T given =
          *place_in<const T>(array, list.row, list.query, panel.first + h);
      const bool dead = given == kInfinity<T> || given == -kInfinity<T>;
      lse[h] = dead ? 0 : given;
      alive[h] = dead ? 0 : 1;
    }
  }
};

}  // namespace
}  // namespace longspan
