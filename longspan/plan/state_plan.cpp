#include "longspan/plan/state_plan.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/rows.h"

namespace longspan {

namespace {

/// A run of a document: who holds it, and which of its chained runs it is.
struct Link {
  int rank = 0;
  int64_t run = 0;
};
using Chain = std::vector<Link>;

/// What a rank needs of one chain: everything before its own last run.
int64_t needed_of(const Chain& chain, int rank) {
  int64_t needed = 0;
  for (int64_t i = 0; i < std::ssize(chain); ++i) {
    if (chain[static_cast<std::size_t>(i)].rank == rank) needed = i;
  }
  return needed;
}

StatePlan::Lists lists_of(const std::vector<Chain>& chains, int ranks, int rank,
                          int64_t chained_here) {
  StatePlan::Lists lists;
  // Where the pair of a link of another rank lies: by chain and link.
  std::map<std::pair<std::size_t, int64_t>, StateStep> came;
  for (int to = 0; to < ranks; ++to) {
    struct Sent {
      StateSend send;
      std::size_t chain;
      int64_t link;
    };
    std::vector<Sent> sent;
    for (std::size_t c = 0; c < chains.size(); ++c) {
      const Chain& chain = chains[c];
      const int64_t needed = needed_of(chain, to);
      for (int64_t i = 0; i < needed; ++i) {
        const Link& link = chain[static_cast<std::size_t>(i)];
        if (link.rank == to) continue;
        sent.push_back({{link.rank, to, link.run, i > 0 ? 1 : 0}, c, i});
      }
    }
    std::ranges::stable_sort(sent, {},
                             [](const Sent& each) { return each.send.from; });
    int64_t states = chained_here, transitions = chained_here;
    for (const Sent& each : sent) {
      lists.sends.push_back(each.send);
      if (to != rank) continue;
      StateStep& place = came[{each.chain, each.link}];
      place.state = states++;
      if (each.send.transition != 0) place.transition = transitions++;
    }
  }
  for (std::size_t c = 0; c < chains.size(); ++c) {
    const Chain& chain = chains[c];
    const auto mine = [&](const Link& link) { return link.rank == rank; };
    if (std::ranges::none_of(chain, mine)) continue;
    const int64_t needed = needed_of(chain, rank);
    for (int64_t i = 0; i <= needed; ++i) {
      const Link& link = chain[static_cast<std::size_t>(i)];
      StateStep step;
      if (mine(link)) step.gives = step.state = step.transition = link.run;
      if (!mine(link)) step = came.at({c, i});
      if (i == 0) step.transition = StateStep::kNone;
      if (i == needed) step.state = step.transition = StateStep::kNone;
      lists.steps.push_back(step);
    }
  }
  return lists;
}

}  // namespace

StatePlan StatePlan::of(const AttentionLayout& layout, int rank, int64_t rows) {
  check_rows_of("StatePlan", layout, rank, rows);
  const Ownership& owners = layout.ownership;
  struct Held {
    int64_t position;
    int rank;
    std::size_t run;  // among all runs of the rank
  };
  std::map<std::pair<int64_t, int64_t>, std::vector<Held>> documents;
  std::vector<std::vector<HaloPlan::RowRun>> runs(
      static_cast<std::size_t>(owners.ranks()));
  for (int each = 0; each < owners.ranks(); ++each) {
    auto& held = runs[static_cast<std::size_t>(each)];
    for (int64_t row = 0; row < rows; ++row) {
      for (const DocumentRun& run :
           runs_of(layout.mask_of(row).packing(), owners, each)) {
        documents[{row, run.document}].push_back(
            {run.position, each, held.size()});
        held.push_back({row, run});
      }
    }
  }
  // Runs of a rank that are chained, numbered in local order.
  std::vector<std::map<std::size_t, int64_t>> numbers(runs.size());
  for (const auto& [document, held] : documents) {
    if (held.size() < 2) continue;
    for (const Held& each : held) {
      numbers[static_cast<std::size_t>(each.rank)][each.run] = 0;
    }
  }
  for (auto& of_rank : numbers) {
    int64_t next = 0;
    for (auto& [run, number] : of_rank) number = next++;
  }
  std::vector<Chain> chains;
  for (auto& [document, held] : documents) {
    if (held.size() < 2) continue;
    std::ranges::sort(held, {}, &Held::position);
    Chain& chain = chains.emplace_back();
    for (const Held& each : held) {
      chain.push_back(
          {each.rank,
           numbers[static_cast<std::size_t>(each.rank)].at(each.run)});
    }
  }
  StatePlan plan;
  plan.rank_ = rank;
  plan.runs_ = std::move(runs[static_cast<std::size_t>(rank)]);
  for (const auto& [run, number] : numbers[static_cast<std::size_t>(rank)]) {
    plan.chained_.push_back(static_cast<int64_t>(run));
  }
  const int64_t here = std::ssize(plan.chained_);
  plan.forward_ = lists_of(chains, owners.ranks(), rank, here);
  for (Chain& chain : chains) std::ranges::reverse(chain);
  plan.backward_ = lists_of(chains, owners.ranks(), rank, here);
  return plan;
}

int64_t StatePlan::sent_bytes(int64_t bytes_per_transition,
                              int64_t bytes_per_state, Pass pass) const {
  check(bytes_per_transition >= 0 && bytes_per_state >= 0,
        "StatePlan: transitions of ", bytes_per_transition, " and states of ",
        bytes_per_state, " bytes");
  int64_t states = 0, transitions = 0;
  for (const StateSend& send : lists(pass).sends) {
    if (send.from != rank_) continue;
    ++states;
    transitions += send.transition;
  }
  const char* const who = "StatePlan";
  return (Checked(who, states) * bytes_per_state +
          Checked(who, transitions) * bytes_per_transition)
      .value();
}

std::string StatePlan::to_string() const {
  return join("StatePlan(", chained_.size(), " of ", runs_.size(),
              " runs of rank ", rank_, " carry a state)");
}

}  // namespace longspan
