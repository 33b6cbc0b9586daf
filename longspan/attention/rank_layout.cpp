#include "longspan/attention/detail/rank_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

#include "longspan/comm/agree.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/detail/even_pieces.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

/// The one that `is_it`, moved to the front, or the end.
template <class Entry, class IsIt>
auto find_recent(std::list<Entry>& entries, const IsIt& is_it) {
  const auto found = std::ranges::find_if(entries, is_it);
  if (found != entries.end()) entries.splice(entries.begin(), entries, found);
  return found;
}

template <class Entry>
void keep_recent(std::list<Entry>& entries, Entry entry, std::size_t most) {
  entries.push_front(std::move(entry));
  if (entries.size() > most) entries.pop_back();
}

struct KeptLayout {
  std::vector<int64_t> code;
  int rank = 0;
  int ranks = 0;
  std::shared_ptr<const RankLayout> layout;
};

class Cache {
 public:
  std::shared_ptr<const RankLayout> find(std::span<const int64_t> code,
                                         const Group& group) {
    const std::lock_guard lock(mutex_);
    const auto found = find_recent(entries_, [&](const KeptLayout& entry) {
      return entry.rank == group.rank() && entry.ranks == group.size() &&
             std::ranges::equal(entry.code, code);
    });
    return found == entries_.end() ? nullptr : found->layout;
  }

  void keep(KeptLayout entry) {
    const std::lock_guard lock(mutex_);
    keep_recent(entries_, std::move(entry), kMost);
  }

 private:
  static constexpr std::size_t kMost = 64;
  std::mutex mutex_;
  std::list<KeptLayout> entries_;
};

std::string words_of(const AttentionLayout& layout, uint64_t fingerprint) {
  const auto brief = [](std::string text) {
    constexpr std::size_t kMost = 100;
    return text.size() > kMost ? text.substr(0, kMost) + ".." : text;
  };
  return join(brief(layout.ownership.to_string()), "; ",
              layout.masks.size() == 1
                  ? brief(layout.masks[0].to_string())
                  : join(layout.masks.size(), " masks, the first ",
                         brief(layout.masks[0].to_string())),
              "; layout ", fingerprint % 1'000'000'007);
}

}  // namespace

std::shared_ptr<const RankLayout> RankLayout::of(const char* who,
                                                 const at::Tensor& code,
                                                 const Group& group) {
  check(code.device().is_cpu() && code.dim() == 1 &&
            code.scalar_type() == at::kLong,
        who, ": `layout` is ", describe(code), " on ", code.device(),
        "; expected the tensor of an AttentionLayout, int64 [n] on the CPU");
  const at::Tensor plain = code.contiguous();
  const int64_t* const numbers = plain.const_data_ptr<int64_t>();
  const std::span given(numbers, static_cast<std::size_t>(plain.numel()));
  static Cache cache;
  if (auto found = cache.find(given, group)) return found;
  const std::vector<int64_t> key(given.begin(), given.end());
  AttentionLayout layout = AttentionLayout::decode(key);
  check(layout.ownership.ranks() == group.size(), who,
        ": the ownership is over ", layout.ownership.ranks(),
        " ranks but the group has ", group.size());
  auto made = std::make_shared<const RankLayout>(
      std::move(layout), group.rank(), hash_of(std::span(key)));
  cache.keep({key, group.rank(), group.size(), made});
  return made;
}

RankLayout::RankLayout(AttentionLayout layout, int rank, uint64_t fingerprint)
    : layout_(std::move(layout)),
      rank_(rank),
      fingerprint_(fingerprint),
      words_(words_of(layout_, fingerprint)) {}

std::shared_ptr<const Plan> RankLayout::plan(const Strategy& strategy,
                                             int64_t rows) const {
  constexpr std::size_t kMost = 8;
  const std::lock_guard lock(mutex_);
  const auto found = find_recent(plans_, [&](const KeptPlan& kept) {
    return kept.strategy == strategy && kept.rows == rows;
  });
  if (found != plans_.end()) return found->plan;
  auto plan =
      std::make_shared<const Plan>(Plan::of(layout_, strategy, rank_, rows));
  keep_recent(plans_, {strategy, rows, plan}, kMost);
  return plan;
}

const RankLayout::KeptMoves& RankLayout::moves() const {
  std::call_once(moves_made_, [&] {
    Moves to_shares = ownership().to_all_ranks();
    Moves to_stream = to_shares.inverse();
    moves_ = std::make_unique<const KeptMoves>(
        KeptMoves{std::move(to_shares), std::move(to_stream)});
  });
  return *moves_;
}

const Moves& RankLayout::to_stream() const {
  return moves().to_stream;
}

const Moves& RankLayout::to_shares() const {
  return moves().to_shares;
}

void RankLayout::check_rows(const char* who, int64_t rows) const {
  check(layout_.masks.size() == 1 || std::ssize(layout_.masks) == rows, who,
        ": ", layout_.masks.size(), " masks for ", rows,
        " rows; give one for all rows, or one for each");
  for (const Mask& mask : layout_.masks) {
    check(mask.is_one_range(), who, ": ", mask.why_not_one_range());
  }
}

KeyWindows RankLayout::windows(const char* who,
                               const std::vector<TokenRange>& queries,
                               int64_t rows, at::Device device) const {
  check_rows(who, rows);
  std::vector<at::Tensor> begins, ends;
  for (const Mask& mask : layout_.masks) {
    KeyWindows of_mask = key_windows(mask, queries);
    begins.push_back(std::move(of_mask.begin));
    ends.push_back(std::move(of_mask.end));
  }
  const auto placed = [&](const std::vector<at::Tensor>& borders) {
    // From memory that the system may move, so it is copied before this
    // returns.
    return at::stack(borders)
        .to(device, /*non_blocking=*/true)
        .expand({rows, borders[0].size(0)});
  };
  return {placed(begins), placed(ends)};
}

KeyWindows RankLayout::windows(const char* who, int64_t rows,
                               at::Device device) const {
  check_rows(who, rows);
  const int64_t masks = std::ssize(layout_.masks);
  const std::lock_guard lock(mutex_);
  auto& kept = windows_[device.str()];
  if (!kept.begin.defined()) {
    kept = windows(who, ownership().ranges_of(rank_), masks, device);
  }
  const auto all = [&](const at::Tensor& border) {
    return border.expand({rows, border.size(1)});
  };
  return {all(kept.begin), all(kept.end)};
}

std::vector<TokenRange> RankLayout::even_pieces(int64_t rows) const {
  check_rows("select_keys", rows);
  const std::lock_guard lock(mutex_);
  if (even_.empty()) {
    even_ = longspan::even_pieces(layout_.masks, ownership().ranks());
  }
  return even_;
}

}  // namespace longspan
