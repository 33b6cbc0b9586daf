#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "longspan/kernels/common/cpu/jobs.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

namespace longspan {

/// Scores that are looked at before candidates are counted again.
inline constexpr int64_t kAppendedAtOnce = 512;

/// Room for the candidates of several queries. Sorting out costs a few passes
/// over all of them, so there is room for several times as many as are kept.
/// More room would leave the cache, and less for very many slots.
class CandidateRoom {
 public:
  CandidateRoom(int64_t slots, int64_t order_bytes, int64_t queries)
      : slots_(slots),
        order_bytes_(order_bytes),
        room_(room_of(slots)),
        memory_(queries * bytes_of(slots, order_bytes)) {}

  static int64_t bytes_of(int64_t slots, int64_t order_bytes) {
    return (room_of(slots) + kCandidateSlack) * (order_bytes + 4);
  }

  /// No candidates yet.
  Candidates of(int64_t query) const {
    const int64_t each = room_ + kCandidateSlack;
    std::byte* const place = memory_.data() + query * each * (order_bytes_ + 4);
    Candidates candidates;
    candidates.orders = place;
    candidates.keys = reinterpret_cast<int32_t*>(place + each * order_bytes_);
    candidates.floor = order_bytes_ == 8 ? std::numeric_limits<int64_t>::min()
                                         : std::numeric_limits<int32_t>::min();
    return candidates;
  }

  /// Looks at scores of keys [first, first + count), behind those of earlier
  /// calls.
  void offer(const TopKeySteps& steps, const void* scores, int64_t count,
             int64_t first, Candidates& candidates) const {
    for (int64_t i = 0; i < count; i += kAppendedAtOnce) {
      const int64_t part = std::min(kAppendedAtOnce, count - i);
      if (candidates.size + part > room_) steps.keep_best(candidates, slots_);
      steps.append(static_cast<const std::byte*>(scores) + i * order_bytes_,
                   part, static_cast<int32_t>(first + i), candidates);
    }
  }

  /// Leaves the best.
  void finish(const TopKeySteps& steps, Candidates& candidates) const {
    if (candidates.size > slots_) steps.keep_best(candidates, slots_);
  }

 private:
  static int64_t room_of(int64_t slots) {
    const int64_t more = std::max(
        {4 * kAppendedAtOnce, std::min<int64_t>(3 * slots, 6144), slots});
    return (slots + more + 15) / 16 * 16;
  }

  int64_t slots_, order_bytes_, room_;
  AlignedBytes memory_;
};

}  // namespace longspan
