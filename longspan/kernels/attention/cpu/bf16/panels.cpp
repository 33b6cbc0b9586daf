#include "longspan/kernels/attention/cpu/bf16/panels.h"

#include <algorithm>
#include <limits>

#include "longspan/kernels/attention/cpu/jobs.h"

namespace longspan {

namespace {

constexpr int64_t kGroupBytes = 640 << 10;
constexpr int64_t kWantedGroups = 32;

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

}  // namespace

GroupWindows::PanelWindows::PanelWindows(const Windows& given)
    : windows(given),
      begin_min(kNone),
      begin_max(0),
      end_min(kNone),
      end_max(0),
      all(true) {
  for (int query = 0; query < kPanel; ++query) {
    const TokenRange range = windows.of[query];
    all &= !range.empty();
    if (range.empty()) continue;
    begin_min = std::min(begin_min, range.begin);
    begin_max = std::max(begin_max, range.begin);
    end_min = std::min(end_min, range.end);
    end_max = std::max(end_max, range.end);
  }
}

PanelKeys GroupWindows::PanelWindows::keys_in(int64_t first, int count) const {
  PanelKeys seen;
  if (end_max <= first || begin_min >= first + count) return seen;
  if (all && begin_max <= first && end_min >= first + count) {
    seen.last = count;
    seen.last_query = kPanel;
    std::ranges::fill(seen.high, count);
    return seen;
  }
  seen.first = count;
  seen.first_query = kPanel;
  for (int query = 0; query < kPanel; ++query) {
    const TokenRange range = windows.of[query];
    const auto place = [&](int64_t key) {
      return static_cast<int32_t>(std::clamp<int64_t>(key - first, 0, count));
    };
    const int32_t low = place(range.begin), high = place(range.end);
    if (low >= high) continue;
    seen.low[query] = low;
    seen.high[query] = high;
    seen.first = std::min<int>(seen.first, low);
    seen.last = std::max<int>(seen.last, high);
    seen.first_query = std::min(seen.first_query, query);
    seen.last_query = query + 1;
  }
  return seen;
}

GroupWindows::GroupWindows(const LineIndex& lines, const PanelGroup& group)
    : panels_(group.count) {
  for (int i = 0; i < panels_; ++i) {
    const Panel& panel = group.panel[i];
    for (const Windows& windows :
         lines.windows_of(group.row, panel.first, panel.count)) {
      of_[i].emplace_back(windows);
    }
    layers_ = std::max(layers_, of_[i].size());
  }
}

bool GroupWindows::next(std::size_t layer, TokenRange keys,
                        SeenKeys& seen) const {
  int64_t first = kNone, last = 0;
  for (int i = 0; i < panels_; ++i) {
    if (layer >= of_[i].size()) continue;
    const PanelWindows& panel = of_[i][layer];
    if (panel.end_max <= keys.begin) continue;
    last = std::max(last, panel.end_max);
    if (panel.begin_max <= keys.begin && panel.end_min > keys.begin) {
      first = keys.begin;
      continue;
    }
    for (int query = 0; query < kPanel; ++query) {
      const TokenRange range = panel.windows.of[query];
      if (range.end <= keys.begin || range.empty()) continue;
      first = std::min(first, std::max(range.begin, keys.begin));
    }
  }
  if (first >= keys.end) return false;
  seen.first = first;
  seen.count = static_cast<int>(std::min<int64_t>(
      {int64_t{kKeysAtOnce}, last - first, keys.end - first}));
  for (int i = 0; i < panels_; ++i) {
    seen.panel[i] = layer < of_[i].size()
                        ? of_[i][layer].keys_in(first, seen.count)
                        : PanelKeys{};
  }
  return true;
}

PanelOrder::PanelOrder(const AttentionArgs& args, int64_t key_head,
                       int per_group)
    : queries_(args.queries),
      key_head_(key_head),
      blocks_((args.queries + kPanel - 1) / kPanel),
      heads_(heads_of(args, key_head)),
      per_group_(per_group) {}

PanelGroup PanelOrder::group(int64_t row, int64_t index) const {
  PanelGroup group;
  group.row = row;
  group.key_head = key_head_;
  const int64_t first = index * per_group_;
  const int64_t last = std::min(first + per_group_, panels());
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = i / heads_.size() * kPanel;
    group.panel[group.count++] = {
        .head = heads_.begin + i % heads_.size(),
        .first = token,
        .count = static_cast<int>(std::min<int64_t>(kPanel, queries_ - token))};
  }
  return group;
}

int panels_per_group(const AttentionArgs& args, int64_t panel_bytes) {
  const int64_t blocks = (args.queries + kPanel - 1) / kPanel;
  int64_t panels =
      std::clamp<int64_t>(kGroupBytes / panel_bytes, 1, kMostPanels);
  while (panels > 1 &&
         args.rows * args.heads * blocks / panels < kWantedGroups) {
    panels /= 2;
  }
  return static_cast<int>(panels);
}

}  // namespace longspan
