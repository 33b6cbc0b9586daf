#include "longspan/plan/halo_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/rows.h"

namespace longspan {

int64_t rows_sent(const std::vector<RowSend>& sends, int rank, Pass pass) {
  int64_t rows = 0;
  for (const RowSend& send : sends) {
    const int64_t sender = pass == Pass::forward ? send.from : send.to;
    if (send.from != send.to && sender == rank) rows += send.length;
  }
  return rows;
}

void check_rows_of(const char* who, const AttentionLayout& layout, int rank,
                   int64_t rows) {
  check(rank >= 0 && rank < layout.ownership.ranks(), who, ": rank ", rank,
        " of ", layout.ownership.ranks());
  check(rows >= 0 && rows <= Plan::kMostRows, who, ": ", rows,
        " rows; expected 0 to ", Plan::kMostRows);
  check(layout.masks.size() == 1 || std::ssize(layout.masks) == rows, who, ": ",
        layout.masks.size(), " masks for ", rows,
        " rows; give one for all rows, or one for each");
  for (const Mask& mask : layout.masks) {
    check(mask.hidden().empty(), who, ": ", mask.to_string(),
          " hides tokens; give a packing in which pads lie outside of the "
          "documents");
  }
  check_listable(who, layout.ownership);
}

namespace {

/// The tokens of a row that the runs of a rank need and do not hold, ascending.
std::vector<TokenRange> needed_before(const std::vector<DocumentRun>& runs,
                                      int64_t count) {
  std::vector<TokenRange> needed;
  for (const DocumentRun& run : runs) {
    const int64_t reach = std::min(count, run.position);
    needed.push_back({run.tokens.begin - reach, run.tokens.begin});
  }
  return normalized(std::move(needed));
}

}  // namespace

HaloPlan HaloPlan::of(const AttentionLayout& layout, int64_t count, int rank,
                      int64_t rows) {
  const char* const who = "HaloPlan";
  check_rows_of(who, layout, rank, rows);
  check(count >= 0, who, ": a count of ", count, "; expected 0 or more");
  const Ownership& owners = layout.ownership;
  HaloPlan plan;
  plan.count_ = count;
  plan.rank_ = rank;
  plan.rows_ = rows;
  plan.local_tokens_ = owners.local_tokens(rank);
  // Where each token that comes here begins to lie, by row and token.
  std::map<std::pair<int64_t, int64_t>, int64_t> arrivals;
  for (int to = 0; to < owners.ranks(); ++to) {
    struct Sent {
      RowSend send;
      int64_t row, token;
    };
    std::vector<Sent> sent;
    for (int64_t row = 0; row < rows; ++row) {
      const auto runs = runs_of(layout.mask_of(row).packing(), owners, to);
      if (to == rank) {
        for (const DocumentRun& run : runs) plan.runs_.push_back({row, run});
      }
      for (TokenRange range : needed_before(runs, count)) {
        for (int64_t token = range.begin; token < range.end;) {
          const auto [owner, held] = owners.holding(token);
          const int64_t end = std::min(range.end, held.end);
          sent.push_back(
              {{owner, to,
                row * owners.local_tokens(owner) + owners.local_of(token),
                end - token},
               row,
               token});
          token = end;
        }
      }
    }
    std::ranges::stable_sort(sent, {},
                             [](const Sent& each) { return each.send.from; });
    for (const Sent& each : sent) {
      plan.sends_.push_back(each.send);
      if (to != rank) continue;
      arrivals[{each.row, each.token}] = plan.received_;
      plan.received_ += each.send.length;
    }
  }
  // The runs need ranges that begin and end inside of what came.
  const auto place_of = [&](int64_t row, int64_t token) {
    const auto after = arrivals.upper_bound({row, token});
    const auto& [from, place] = *std::prev(after);
    return place + (token - from.second);
  };
  const int64_t entries =
      (Checked(who, std::ssize(plan.runs_)) * count).value();
  check(entries <= kMostPlaces, who, ": ", plan.runs_.size(), " runs of ",
        count, " tokens before each; a plan has at most ", kMostPlaces);
  plan.places_.reserve(static_cast<std::size_t>(entries));
  for (const auto& [row, run] : plan.runs_) {
    for (int64_t back = count; back > 0; --back) {
      plan.places_.push_back(back > run.position
                                 ? plan.received_
                                 : place_of(row, run.tokens.begin - back));
    }
  }
  return plan;
}

std::vector<int32_t> HaloPlan::seen() const {
  const char* const who = "HaloPlan";
  const Checked tokens = Checked(who, rows_) * local_tokens_;
  check((tokens + received_).value() <= std::numeric_limits<int32_t>::max() &&
            (tokens * (Checked(who, count_) + 1)).value() <= 4 * kMostPlaces,
        who, ": ", tokens.value(), " tokens that see ", count_,
        " before them; lists have at most ", 4 * kMostPlaces, " entries");
  const int64_t width = count_ + 1;
  std::vector<int32_t> lists(static_cast<std::size_t>(tokens.value() * width),
                             -1);
  const int64_t* before = places_.data();
  for (const auto& [row, run] : runs_) {
    const int64_t first = row * local_tokens_ + run.local;
    for (int64_t i = 0; i < run.size(); ++i) {
      int32_t* const list =
          &lists[static_cast<std::size_t>((first + i) * width)];
      for (int64_t back = std::min(count_, run.position + i); back >= 0;
           --back) {
        const int64_t place = back <= i
                                  ? first + i - back
                                  : tokens.value() + before[count_ + i - back];
        list[count_ - back] = static_cast<int32_t>(place);
      }
    }
    before += count_;
  }
  return lists;
}

int64_t HaloPlan::sent_bytes(int64_t bytes, Pass pass) const {
  check(bytes >= 0, "HaloPlan: tokens of ", bytes, " bytes");
  return (Checked("HaloPlan", rows_sent(sends_, rank_, pass)) * bytes).value();
}

std::string HaloPlan::to_string() const {
  return join("HaloPlan(", count_, " tokens before each of ", runs_.size(),
              " runs of rank ", rank_, ", ", received_, " come)");
}

}  // namespace longspan
