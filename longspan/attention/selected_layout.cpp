#include "longspan/attention/selected_layout.h"

#include <ATen/ATen.h>

#include <limits>
#include <list>

#include "longspan/comm/agree.h"
#include "longspan/core/check.h"
#include "longspan/core/even_pieces.h"
#include "longspan/core/per_token.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

struct Entry {
  std::vector<int64_t> code;
  int rank = 0;
  int ranks = 0;
  std::shared_ptr<const SelectedLayout> layout;
};

/// The layers of a model ask for the same few layouts again and again.
class Cache {
 public:
  std::shared_ptr<const SelectedLayout> find(const std::vector<int64_t>& code,
                                             const Group& group) {
    const std::lock_guard lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->rank == group.rank() && entry->ranks == group.size() &&
          entry->code == code) {
        entries_.splice(entries_.begin(), entries_, entry);
        return entries_.front().layout;
      }
    }
    return nullptr;
  }

  void keep(Entry entry) {
    const std::lock_guard lock(mutex_);
    entries_.push_front(std::move(entry));
    if (entries_.size() > kMost) entries_.pop_back();
  }

 private:
  static constexpr std::size_t kMost = 32;
  std::mutex mutex_;
  std::list<Entry> entries_;
};

}  // namespace

std::shared_ptr<const SelectedLayout> SelectedLayout::of(const char* who,
                                                         const at::Tensor& code,
                                                         const Group& group) {
  check(code.device().is_cpu() && code.dim() == 1 &&
            code.scalar_type() == at::kLong,
        who, ": `layout` is ", describe(code), " on ", code.device().str(),
        "; expected what attention_layout made, int64 [n] on the CPU");
  const at::Tensor plain = code.contiguous();
  const int64_t* const numbers = plain.const_data_ptr<int64_t>();
  const std::vector<int64_t> key(numbers, numbers + plain.numel());
  static Cache cache;
  if (auto found = cache.find(key, group)) return found;
  AttentionLayout layout = AttentionLayout::decode(key);
  check(layout.ownership.ranks() == group.size(), who,
        ": the ownership is over ", layout.ownership.ranks(),
        " ranks but the group has ", group.size());
  check(layout.ownership.tokens() < std::numeric_limits<int32_t>::max(), who,
        ": the stream has ", layout.ownership.tokens(),
        " tokens; keys are counted in 32 bits");
  auto made = std::make_shared<const SelectedLayout>(
      std::move(layout), group.rank(), hash_of(std::span(key)));
  cache.keep({key, group.rank(), group.size(), made});
  return made;
}

SelectedLayout::SelectedLayout(AttentionLayout layout, int rank,
                               uint64_t fingerprint)
    : layout_(std::move(layout)),
      rank_(rank),
      fingerprint_(fingerprint),
      to_shares_(layout_.ownership.to_all_ranks()) {
  to_stream_ = to_shares_.inverse();
}

void SelectedLayout::check_rows(const char* who, int64_t rows) const {
  check(layout_.masks.size() == 1 || std::ssize(layout_.masks) == rows, who,
        ": ", layout_.masks.size(), " masks for ", rows,
        " rows; give one for all rows, or one for each");
  for (const Mask& mask : layout_.masks) {
    check(mask.is_one_range(), who, ": ", mask.why_not_one_range());
  }
}

KeyWindows SelectedLayout::windows(const char* who,
                                   const std::vector<TokenRange>& queries,
                                   int64_t rows, at::Device device) const {
  check_rows(who, rows);
  const int64_t masks = std::ssize(layout_.masks);
  const int64_t count = count_tokens(queries);
  const auto ints = at::TensorOptions(at::kInt);
  at::Tensor start = at::empty({masks, count}, ints);
  at::Tensor end = at::empty({masks, count}, ints);
  auto* from = start.mutable_data_ptr<int32_t>();
  auto* to = end.mutable_data_ptr<int32_t>();
  for (const Mask& mask : layout_.masks) {
    for (const TokenRange range : queries) {
      write_key_windows(mask, range, from, to);
      from += range.size();
      to += range.size();
    }
  }
  const auto placed = [&](const at::Tensor& border) {
    // From memory that the system may move, so it is copied before this
    // returns.
    return border.to(device, /*non_blocking=*/true).expand({rows, count});
  };
  return {placed(start), placed(end)};
}

KeyWindows SelectedLayout::windows(const char* who, int64_t rows,
                                   at::Device device) const {
  check_rows(who, rows);
  const int64_t masks = std::ssize(layout_.masks);
  const std::lock_guard lock(mutex_);
  auto& kept = windows_[device.str()];
  if (!kept.start.defined()) {
    kept = windows(who, ownership().ranges_of(rank_), masks, device);
  }
  const auto all = [&](const at::Tensor& border) {
    return border.expand({rows, border.size(1)});
  };
  return {all(kept.start), all(kept.end)};
}

std::vector<TokenRange> SelectedLayout::even_pieces(int64_t rows) const {
  check_rows("select_keys", rows);
  const std::lock_guard lock(mutex_);
  if (even_.empty()) {
    even_ = longspan::even_pieces(layout_.masks, ownership().ranks());
  }
  return even_;
}

}  // namespace longspan
