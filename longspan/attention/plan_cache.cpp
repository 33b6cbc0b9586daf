#include <ATen/ATen.h>

#include <algorithm>
#include <list>
#include <mutex>

#include "longspan/attention/attend.h"
#include "longspan/core/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

/// All that a plan depends on.
struct PlanKey {
  Strategy strategy;
  int rank;
  int ranks;
  int64_t rows;
  std::vector<int64_t> code;
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

/// The layers of a model ask for the same few plans again and again. A plan is
/// a pure function of its key, so who shares it cannot be noticed.
class PlanCache {
 public:
  std::shared_ptr<const Plan> find_or_make(PlanKey key) {
    {
      const std::lock_guard lock(mutex_);
      for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
        if (entry->key == key) {
          entries_.splice(entries_.begin(), entries_, entry);
          return entries_.front().plan;
        }
      }
    }
    const AttentionLayout layout = AttentionLayout::decode(key.code);
    check(layout.ownership.ranks() == key.ranks,
          "attend: the ownership is over ", layout.ownership.ranks(),
          " ranks but the group has ", key.ranks);
    auto plan = std::make_shared<const Plan>(
        Plan::of(layout, key.strategy, key.rank, key.rows));
    const std::lock_guard lock(mutex_);
    entries_.push_front({std::move(key), plan});
    if (entries_.size() > kMost) entries_.pop_back();
    return plan;
  }

 private:
  static constexpr std::size_t kMost = 64;
  struct Entry {
    PlanKey key;
    std::shared_ptr<const Plan> plan;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

}  // namespace

std::shared_ptr<const Plan> plan_for(const at::Tensor& layout,
                                     const std::string& strategy,
                                     int head_ranks, int64_t key_heads,
                                     int64_t rows, const Group& group) {
  check(layout.device().is_cpu() && layout.dim() == 1 &&
            layout.scalar_type() == at::kLong,
        "attend: `layout` is ", describe(layout), " on ", layout.device().str(),
        "; expected what attention_layout made, int64 [n] on the CPU");
  const at::Tensor code = layout.contiguous();
  const int64_t* numbers = code.const_data_ptr<int64_t>();
  static PlanCache cache;
  return cache.find_or_make(
      {Strategy::named(strategy, group.size(), key_heads, head_ranks),
       group.rank(),
       group.size(),
       rows,
       {numbers, numbers + code.numel()}});
}

}  // namespace longspan
