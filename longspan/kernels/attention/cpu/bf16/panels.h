#pragma once

#include <cstdint>
#include <vector>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/blocks.h"

/// How bfloat16 attention is cut where products run on pairs of bfloat16.
///
/// A panel is 64 queries of one head. Panels that share a key head walk the
/// keys together in a group, so that a block of keys is packed once for all of
/// them; each sees its own part of the block.
namespace longspan {

inline constexpr int kPanel = 64;        // queries
inline constexpr int kKeysAtOnce = 128;  // keys of a block, at most
inline constexpr int kMostPanels = 8;
static_assert(kPanel <= kBlock);

struct Panel {
  int64_t head = 0, first = 0;  // query head, first query
  int count = 0;                // of queries, 1 to kPanel
};

struct PanelGroup {
  int64_t row = 0, key_head = 0;
  int count = 0;  // of panels
  Panel panel[kMostPanels];
};

/// What one panel sees of a block of keys: query i those [low, high) of the
/// block. No query sees a key outside [first, last), and queries outside
/// [first_query, last_query) see nothing; both are empty where no query sees.
struct PanelKeys {
  int first = 0, last = 0;
  int first_query = 0, last_query = 0;
  int32_t low[kPanel] = {}, high[kPanel] = {};

  bool empty() const { return first >= last; }
};

/// Consecutive keys, of which some query sees the first.
struct SeenKeys {
  int64_t first = 0;
  int count = 0;  // 1 to kKeysAtOnce
  PanelKeys panel[kMostPanels];
};

/// What the panels of a group see, ready to be walked in blocks of keys.
class GroupWindows {
 public:
  GroupWindows(const LineIndex& lines, const PanelGroup& group);

  /// Calls visit(seen) for each block of `keys` that some query sees, in order;
  /// windows that share queries come one after another.
  template <class Visit>
  void each_block(TokenRange keys, const Visit& visit) const {
    SeenKeys seen;
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      for (int64_t key = keys.begin; next(layer, {key, keys.end}, seen);
           key = seen.first + seen.count) {
        visit(seen);
      }
    }
  }

 private:
  /// One panel's windows, and the bounds of their ends: most blocks are seen by
  /// all its queries or by none, which these four numbers tell.
  struct PanelWindows {
    Windows windows;
    int64_t begin_min, begin_max, end_min, end_max;  // of those not empty
    bool all;                                        // none is empty

    explicit PanelWindows(const Windows& given);
    PanelKeys keys_in(int64_t first, int count) const;
  };

  bool next(std::size_t layer, TokenRange keys, SeenKeys& seen) const;

  int panels_;
  std::size_t layers_ = 0;
  std::vector<PanelWindows> of_[kMostPanels];  // by layer; some have fewer
};

/// The panels of one (row, key head), in the order in which they are grouped:
/// heads of a block of queries side by side, for they see the same keys.
class PanelOrder {
 public:
  PanelOrder(const AttentionArgs& args, int64_t key_head, int per_group);

  int64_t groups() const { return (panels() + per_group_ - 1) / per_group_; }
  PanelGroup group(int64_t row, int64_t index) const;

 private:
  int64_t panels() const { return heads_.size() * blocks_; }

  int64_t queries_, key_head_, blocks_;
  TokenRange heads_;
  int per_group_;
};

/// How many panels walk together: as many as keep what they hold in the second
/// cache, fewer where that would leave too few groups for many threads.
int panels_per_group(const AttentionArgs& args, int64_t panel_bytes);

}  // namespace longspan
