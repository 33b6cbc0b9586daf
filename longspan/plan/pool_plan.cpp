#include "longspan/plan/pool_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/rows.h"

namespace longspan {

namespace {

/// The window of a pool, and all tokens that it looks at.
struct Pool {
  int64_t row = 0;
  int64_t position = 0;  // of the first token of the window
  TokenRange window;
  TokenRange seen;
};

/// visit(pool) for every pool of the rows, in order.
template <class Visit>
void for_each_pool(const AttentionLayout& layout, int64_t rows, int64_t ratio,
                   PoolOverlap overlap, const Visit& visit) {
  for (int64_t row = 0; row < rows; ++row) {
    const Packing& packing = layout.mask_of(row).packing();
    for (int64_t d = 0; d < packing.documents(); ++d) {
      const TokenRange real = packing.real(d);
      for (int64_t begin = real.begin; real.end - begin >= ratio;
           begin += ratio) {
        const bool looks_back =
            overlap == PoolOverlap::previous && begin > real.begin;
        visit(Pool{row,
                   begin - real.begin,
                   {begin, begin + ratio},
                   {looks_back ? begin - ratio : begin, begin + ratio}});
      }
    }
  }
}

}  // namespace

/// Goes over all pools once, in order, and then knows what travels.
class PoolPlan::Maker {
 public:
  Maker(const AttentionLayout& layout, int64_t ratio, PoolOverlap overlap,
        int rank, int64_t rows)
      : layout_(layout),
        owners_(layout.ownership),
        rows_(rows),
        local_(owners_.local_tokens(rank)),
        holders_(owners_) {
    plan_.ratio_ = ratio;
    plan_.overlap_ = overlap;
    plan_.rank_ = rank;
    plan_.sizes_.assign(static_cast<std::size_t>(owners_.ranks()), 0);
  }

  PoolPlan made() {
    for_each_pool(layout_, rows_, plan_.ratio_, plan_.overlap_,
                  [&](const Pool& pool) { add(pool); });
    send_parts();
    merge_parts();
    find_in_stream();
    show_pools();
    return std::move(plan_);
  }

 private:
  /// Tokens that lie in one run of memory on one rank.
  struct Piece {
    int rank = 0;
    TokenRange tokens;
  };

  /// Who holds tokens. Neighbours mostly lie in one range, so the last one
  /// found is looked at first.
  class Holders {
   public:
    explicit Holders(const Ownership& owners) : owners_(owners) {}

    const std::vector<Piece>& of(TokenRange tokens) {
      pieces_.clear();
      for (int64_t token = tokens.begin; token < tokens.end;) {
        if (!held_.range.contains(token)) held_ = owners_.holding(token);
        const int64_t end = std::min(tokens.end, held_.range.end);
        pieces_.push_back({held_.rank, {token, end}});
        token = end;
      }
      return pieces_;
    }

   private:
    const Ownership& owners_;
    Ownership::Holding held_ = {0, {0, 0}};
    std::vector<Piece> pieces_;
  };

  /// The ranks of pieces, each once and ascending.
  static std::vector<int> ranks_of_pieces(const std::vector<Piece>& pieces) {
    std::vector<int> ranks;
    for (const Piece& piece : pieces) ranks.push_back(piece.rank);
    std::ranges::sort(ranks);
    const auto [first, last] = std::ranges::unique(ranks);
    ranks.erase(first, last);
    return ranks;
  }

  struct Part {
    int owner = 0;
    std::vector<int32_t> list;
  };
  /// Who sends a part of a pool, and how many it sent to us before.
  struct Comer {
    int from = 0;
    int64_t nth = 0;
  };

  void add(const Pool& pool) {
    const std::vector<Piece>& pieces = holders_.of(pool.seen);
    const int owner = pieces.back().rank;
    const bool is_mine = owner == plan_.rank_;
    owner_of_pool_.push_back(owner);
    ++plan_.sizes_[static_cast<std::size_t>(owner)];
    if (is_mine) plan_.positions_.push_back(pool.position);
    if (std::ranges::all_of(
            pieces, [&](const Piece& piece) { return piece.rank == owner; })) {
      if (is_mine) {
        append(list_of(pool, pieces));
        plan_.order_.push_back(plan_.whole_++);
      }
      return;
    }
    std::vector<Comer> comers;
    for (const int from : ranks_of_pieces(pieces)) {
      comers.push_back({from, parts_between_[{owner, from}]++});
      if (from == plan_.rank_) parts_.push_back({owner, list_of(pool, pieces)});
    }
    if (!is_mine) return;
    plan_.order_.push_back(-1 - std::ssize(merges_));  // behind the whole ones
    merges_.push_back(std::move(comers));
  }

  /// What this rank has of a pool.
  std::vector<int32_t> list_of(const Pool& pool,
                               const std::vector<Piece>& pieces) const {
    const int64_t halves = plan_.halves();
    const int64_t own = plan_.slots() - plan_.ratio_;  // slots before its own
    std::vector<int32_t> list(static_cast<std::size_t>(plan_.slots()), -1);
    for (const auto& [rank, tokens] : pieces) {
      if (rank != plan_.rank_) continue;
      const int64_t first = pool.row * local_ + owners_.local_of(tokens.begin);
      for (int64_t i = 0; i < tokens.size(); ++i) {
        const int64_t slot = own + tokens.begin + i - pool.window.begin;
        const int64_t half = slot < own ? 0 : halves - 1;
        list[static_cast<std::size_t>(slot)] =
            static_cast<int32_t>((first + i) * halves + half);
      }
    }
    return list;
  }

  void append(const std::vector<int32_t>& list) {
    plan_.lists_.insert(plan_.lists_.end(), list.begin(), list.end());
  }

  void send_parts() {
    std::ranges::stable_sort(parts_, {}, &Part::owner);
    for (const Part& part : parts_) append(part.list);
    // A rank's parts lie by owner, so those of lower owners come first.
    std::map<int, int64_t> next;
    for (const auto& [between, count] : parts_between_) {
      const auto [to, from] = between;
      int64_t& begin = next[from];
      plan_.sends_.push_back({from, to, begin, count});
      begin += count;
      if (to != plan_.rank_) continue;
      arrival_[from] = plan_.received_;
      plan_.received_ += count;
    }
  }

  void merge_parts() {
    for (const auto& comers : merges_) {
      plan_.most_parts_ = std::max(plan_.most_parts_, std::ssize(comers));
    }
    const auto most = static_cast<std::size_t>(plan_.most_parts_);
    for (const auto& comers : merges_) {
      for (const auto& [from, nth] : comers) {
        plan_.merges_.push_back(static_cast<int32_t>(arrival_.at(from) + nth));
      }
      plan_.merges_.resize(plan_.merges_.size() + most - comers.size(), -1);
    }
    for (int64_t& place : plan_.order_) {
      if (place < 0) place = plan_.whole_ - 1 - place;
    }
  }

  void find_in_stream() {
    std::vector<int64_t> next(plan_.sizes_.size(), 0);
    std::partial_sum(plan_.sizes_.begin(), plan_.sizes_.end() - 1,
                     next.begin() + 1);
    plan_.in_stream_.reserve(owner_of_pool_.size());
    for (const int owner : owner_of_pool_) {
      plan_.in_stream_.push_back(next[static_cast<std::size_t>(owner)]++);
    }
  }

  void show_pools() {
    plan_.windows_.resize(static_cast<std::size_t>(rows_ * local_));
    int64_t pools_before = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const Packing& packing = layout_.mask_of(row).packing();
      std::vector<int64_t> first_of = {pools_before};
      for (const int64_t length : packing.lengths()) {
        first_of.push_back(first_of.back() + length / plan_.ratio_);
      }
      for (const DocumentRun& run : runs_of(packing, owners_, plan_.rank_)) {
        const int64_t first = first_of[static_cast<std::size_t>(run.document)];
        TokenRange* const window =
            &plan_.windows_[static_cast<std::size_t>(row * local_ + run.local)];
        for (int64_t i = 0; i < run.size(); ++i) {
          const int64_t seen = run.position + i + 1;  // of its document
          window[i] = {first, first + seen / plan_.ratio_};
        }
      }
      pools_before = first_of.back();
    }
  }

  const AttentionLayout& layout_;
  const Ownership& owners_;
  int64_t rows_;
  int64_t local_;  // tokens of a row that this rank holds
  Holders holders_;
  PoolPlan plan_;
  std::vector<int> owner_of_pool_;
  std::map<std::pair<int, int>, int64_t> parts_between_;  // (to, from)
  std::vector<Part> parts_;                               // of this rank
  std::vector<std::vector<Comer>> merges_;                // of its pools
  std::map<int, int64_t> arrival_;  // of the first part that a rank sends here
};

PoolPlan PoolPlan::of(const AttentionLayout& layout, int64_t ratio,
                      PoolOverlap overlap, int rank, int64_t rows) {
  const char* const who = "PoolPlan";
  check_rows_of(who, layout, rank, rows);
  check(ratio >= 1 && ratio <= kMostPlaces, who, ": pools of ", ratio,
        " tokens; expected 1 to ", kMostPlaces);
  check((Checked(who, layout.ownership.tokens()) * rows * 2).value() <=
            std::numeric_limits<int32_t>::max(),
        who, ": ", rows, " rows of ", layout.ownership.tokens(),
        " tokens; their halves are counted in 32 bits");
  return Maker(layout, ratio, overlap, rank, rows).made();
}

int64_t PoolPlan::sent_bytes(int64_t channels, int64_t bytes_per_sum,
                             Pass pass) const {
  check(channels >= 0 && bytes_per_sum >= 0, "PoolPlan: ", channels,
        " channels of ", bytes_per_sum, " bytes");
  // A part is its pool and the log of its weights.
  return (Checked("PoolPlan", rows_sent(sends_, rank_, pass)) * 2 * channels *
          bytes_per_sum)
      .value();
}

int64_t PoolPlan::gathered_bytes(int64_t bytes, Pass pass) const {
  check(bytes >= 0, "PoolPlan: pools of ", bytes, " bytes");
  const int64_t pools = pass == Pass::forward
                            ? (std::ssize(sizes_) - 1) * here()
                            : total() - here();
  return (Checked("PoolPlan", pools) * bytes).value();
}

std::string PoolPlan::to_string() const {
  return join("PoolPlan(", here(), " of ", total(), " pools of ", ratio_,
              " tokens on rank ", rank_,
              overlap_ == PoolOverlap::previous ? ", overlapping" : "", ", ",
              std::ssize(merges_) / most_parts_, " merged)");
}

}  // namespace longspan
