#include "longspan/plan/state_plan.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/rows.h"

namespace longspan {

namespace {

constexpr const char* kWho = "StatePlan";

/// A run of a document: who holds it, and which of its chained runs it is.
struct Link {
  int rank = 0;
  int64_t run = 0;
};
using Chain = std::vector<Link>;

/// What all ranks send, and what each of them does with it.
struct Program {
  std::vector<StateSend> sends;
  std::vector<std::vector<StateStep>> steps;  // by rank
};

/// Programs grow round by round. Pairs are known by the link whose rank holds
/// them; a rank numbers its places as StateStep says.
class Writer {
 public:
  Writer(const std::vector<Chain>& chains, std::vector<int64_t> chained)
      : chains_(chains), places_(std::move(chained)) {
    program_.steps.resize(places_.size());
  }

  const Link& link(std::size_t chain, int64_t i) const {
    return chains_[chain][static_cast<std::size_t>(i)];
  }

  /// In this round the pair at a place of `from` goes to `to`. Where it lies
  /// there is known when all of the round are written.
  struct Wish {
    StateSend send;
    std::size_t chain;
    int64_t link;
  };
  void ask(const Wish& wish) { wishes_.push_back(wish); }

  /// All of the round: places at their receivers, by chain, link and receiver.
  using Came = std::map<std::tuple<std::size_t, int64_t, int>, int64_t>;
  Came exchange() {
    std::ranges::stable_sort(wishes_, {}, [](const Wish& wish) {
      return std::pair{wish.send.to, wish.send.from};
    });
    Came came;
    for (const Wish& wish : wishes_) {
      program_.sends.push_back(wish.send);
      const auto to = static_cast<int>(wish.send.to);
      came[{wish.chain, wish.link, to}] = place(to)++;
    }
    wishes_.clear();
    return came;
  }

  /// The place that the step keeps, if it does.
  int64_t add(int rank, const StateStep& step) {
    program_.steps[static_cast<std::size_t>(rank)].push_back(step);
    return step.keeps != 0 ? place(rank)++ : StateStep::kNone;
  }

  Program take() { return std::move(program_); }

 private:
  int64_t& place(int rank) { return places_[static_cast<std::size_t>(rank)]; }

  const std::vector<Chain>& chains_;
  std::vector<int64_t> places_;  // of each rank, so far
  std::vector<Wish> wishes_;
  Program program_;
};

/// What a rank needs of one chain: everything before its own last run.
int64_t needed_of(const Chain& chain, int rank) {
  int64_t needed = 0;
  for (int64_t i = 0; i < std::ssize(chain); ++i) {
    if (chain[static_cast<std::size_t>(i)].rank == rank) needed = i;
  }
  return needed;
}

std::set<int> ranks_in(const Chain& chain) {
  std::set<int> ranks;
  for (const Link& link : chain) ranks.insert(link.rank);
  return ranks;
}

Program direct_program(const std::vector<Chain>& chains,
                       const std::vector<int64_t>& chained) {
  Writer writer(chains, chained);
  for (std::size_t c = 0; c < chains.size(); ++c) {
    for (const int to : ranks_in(chains[c])) {
      const int64_t needed = needed_of(chains[c], to);
      for (int64_t i = 0; i < needed; ++i) {
        const Link& link = writer.link(c, i);
        if (link.rank == to) continue;
        writer.ask({{0, link.rank, to, link.run, i > 0 ? 1 : 0}, c, i});
      }
    }
  }
  const auto came = writer.exchange();
  for (std::size_t c = 0; c < chains.size(); ++c) {
    for (const int rank : ranks_in(chains[c])) {
      const int64_t needed = needed_of(chains[c], rank);
      for (int64_t i = 0; i <= needed; ++i) {
        const Link& link = writer.link(c, i);
        const bool mine = link.rank == rank;
        StateStep step;
        if (mine) step.gives = link.run;
        if (i < needed) {
          step.place = mine ? link.run : came.at({c, i, rank});
          step.transition = i > 0 ? 1 : 0;
        }
        writer.add(rank, step);
      }
    }
  }
  return writer.take();
}

/// Of each link the pairs that it knows, as places at its rank.
struct Known {
  int64_t before = StateStep::kNone;  // of the runs right before it
  int64_t with = StateStep::kNone;    // of those and itself
};

Program scan_program(const std::vector<Chain>& chains,
                     const std::vector<int64_t>& chained) {
  Writer writer(chains, chained);
  std::vector<std::vector<Known>> known;
  int64_t longest = 0;
  for (const Chain& chain : chains) {
    auto& links = known.emplace_back();
    for (const Link& link : chain) links.push_back({.with = link.run});
    longest = std::max(longest, std::ssize(chain));
  }
  for (int64_t round = 0, reach = 1; reach < longest; ++round, reach *= 2) {
    // Link i asks link i - reach for what the `reach` runs that end there make
    // of a state; from the document's beginning on there is none to ask for.
    const auto begins = [&](int64_t i) { return i - reach < reach; };
    for (std::size_t c = 0; c < chains.size(); ++c) {
      for (int64_t i = reach; i < std::ssize(chains[c]); ++i) {
        const Link &from = writer.link(c, i - reach), &to = writer.link(c, i);
        if (from.rank == to.rank) continue;
        const Known& sent = known[c][static_cast<std::size_t>(i - reach)];
        writer.ask(
            {{round, from.rank, to.rank, sent.with, begins(i) ? 0 : 1}, c, i});
      }
    }
    const auto came = writer.exchange();
    for (std::size_t c = 0; c < chains.size(); ++c) {
      const int64_t links = std::ssize(chains[c]);
      // From the end, so that what a link tells others of this round is not
      // yet what it knows after it.
      for (int64_t i = links - 1; i >= reach; --i) {
        const Link &from = writer.link(c, i - reach), &to = writer.link(c, i);
        Known& mine = known[c][static_cast<std::size_t>(i)];
        const int64_t told =
            from.rank == to.rank
                ? known[c][static_cast<std::size_t>(i - reach)].with
                : came.at({c, i, to.rank});
        StateStep step{.round = round, .place = told};
        step.transition = begins(i) ? 0 : 1;
        writer.add(to.rank, step);
        if (mine.before != StateStep::kNone) {
          writer.add(to.rank,
                     {.round = round, .place = mine.before, .transition = 1});
        }
        // Now at hand: all before it that it will ever know, or half of what
        // it knows after the next round.
        step = {.round = round};
        if (begins(i)) step.gives = to.run;
        if (!begins(i)) step.keeps = 1;
        const bool asked = i + 2 * reach < links;
        if (asked) step.place = to.run, step.transition = 1;
        mine.before = writer.add(to.rank, step);
        if (asked) {
          mine.with = writer.add(to.rank, {.round = round, .keeps = 1});
        }
      }
    }
  }
  return writer.take();
}

Program program_of(StateWay way, const std::vector<Chain>& chains,
                   const std::vector<int64_t>& chained) {
  return way == StateWay::scan ? scan_program(chains, chained)
                               : direct_program(chains, chained);
}

/// The runs of all ranks, and how documents chain them.
struct Chained {
  std::vector<std::vector<HaloPlan::RowRun>> runs;      // by rank
  std::vector<std::map<std::size_t, int64_t>> numbers;  // of chained runs
  std::vector<Chain> chains;

  std::vector<int64_t> counts() const {
    std::vector<int64_t> counts;
    for (const auto& of_rank : numbers) counts.push_back(std::ssize(of_rank));
    return counts;
  }
};

Chained chained_of(const AttentionLayout& layout, int64_t rows) {
  const Ownership& owners = layout.ownership;
  struct Held {
    int64_t position;
    int rank;
    std::size_t run;  // among all runs of the rank
  };
  std::map<std::pair<int64_t, int64_t>, std::vector<Held>> documents;
  Chained found;
  found.runs.resize(static_cast<std::size_t>(owners.ranks()));
  for (int each = 0; each < owners.ranks(); ++each) {
    auto& held = found.runs[static_cast<std::size_t>(each)];
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
  found.numbers.resize(found.runs.size());
  for (const auto& [document, held] : documents) {
    if (held.size() < 2) continue;
    for (const Held& each : held) {
      found.numbers[static_cast<std::size_t>(each.rank)][each.run] = 0;
    }
  }
  for (auto& of_rank : found.numbers) {
    int64_t next = 0;
    for (auto& [run, number] : of_rank) number = next++;
  }
  for (auto& [document, held] : documents) {
    if (held.size() < 2) continue;
    std::ranges::sort(held, {}, &Held::position);
    Chain& chain = found.chains.emplace_back();
    for (const Held& each : held) {
      chain.push_back(
          {each.rank,
           found.numbers[static_cast<std::size_t>(each.rank)].at(each.run)});
    }
  }
  return found;
}

void reverse(std::vector<Chain>& chains) {
  for (Chain& chain : chains) std::ranges::reverse(chain);
}

/// Seconds of the rank that works longest, round by round.
double seconds_of(const Program& program, const StatePair& pair,
                  const StateCosts& costs) {
  struct Load {
    std::map<int64_t, double> sent, received;  // bytes by rank
    double most_work = 0;                      // additions, multiplications
  };
  std::map<int64_t, Load> rounds;
  const auto state = static_cast<double>(pair.state_bytes),
             transition = static_cast<double>(pair.transition_bytes);
  for (const StateSend& send : program.sends) {
    const double bytes = send.transition != 0 ? state + transition : state;
    rounds[send.round].sent[send.from] += bytes;
    rounds[send.round].received[send.to] += bytes;
  }
  // Of float32: a number is multiplied and added `matrix_rows` times.
  const double per_byte = static_cast<double>(pair.matrix_rows) * 2 / 4;
  for (const auto& steps : program.steps) {
    std::map<int64_t, double> work;
    bool at_hand = false, has_transition = false;
    for (const StateStep& step : steps) {
      if (step.place == StateStep::kNone) {
        at_hand = false;
        continue;
      }
      if (at_hand) {
        work[step.round] +=
            per_byte * (has_transition ? state + transition : state);
      } else {
        at_hand = true;
        has_transition = step.transition != 0;
      }
    }
    for (const auto& [round, done] : work) {
      rounds[round].most_work = std::max(rounds[round].most_work, done);
    }
  }
  double seconds = 0;
  for (const auto& [round, load] : rounds) {
    double most = 0;
    for (const auto& [rank, bytes] : load.sent) most = std::max(most, bytes);
    for (const auto& [rank, bytes] : load.received) {
      most = std::max(most, bytes);
    }
    if (!load.sent.empty()) seconds += costs.exchange_seconds;
    seconds += most / costs.bytes_per_second +
               load.most_work / costs.operations_per_second;
  }
  return seconds;
}

}  // namespace

StatePlan StatePlan::of(const AttentionLayout& layout, int rank, int64_t rows,
                        StateWay way) {
  check_rows_of(kWho, layout, rank, rows);
  Chained found = chained_of(layout, rows);
  const auto me = static_cast<std::size_t>(rank);
  StatePlan plan;
  plan.rank_ = rank;
  plan.way_ = way;
  for (const auto& [run, number] : found.numbers[me]) {
    plan.chained_.push_back(static_cast<int64_t>(run));
  }
  const auto counts = found.counts();
  for (Lists* const lists : {&plan.forward_, &plan.backward_}) {
    Program program = program_of(way, found.chains, counts);
    *lists = {std::move(program.sends), std::move(program.steps[me])};
    reverse(found.chains);
  }
  plan.runs_ = std::move(found.runs[me]);
  return plan;
}

StateWay StatePlan::choose(const AttentionLayout& layout, const StatePair& pair,
                           int64_t rows, const StateCosts& costs) {
  check_rows_of(kWho, layout, 0, rows);
  check(pair.transition_bytes >= 0 && pair.state_bytes >= 0 &&
            pair.matrix_rows >= 1,
        kWho, ": transitions of ", pair.transition_bytes, " bytes and ",
        pair.matrix_rows, " rows, and states of ", pair.state_bytes, " bytes");
  Chained found = chained_of(layout, rows);
  // Three runs send as much either way, and one exchange is quicker than two.
  constexpr std::size_t kFew = 3;
  if (std::ranges::all_of(found.chains, [](const Chain& chain) {
        return chain.size() <= kFew;
      })) {
    return StateWay::direct;
  }
  double seconds[2] = {};
  const auto counts = found.counts();
  for (int pass = 0; pass < 2; ++pass) {
    for (const StateWay way : {StateWay::direct, StateWay::scan}) {
      seconds[static_cast<int>(way)] +=
          seconds_of(program_of(way, found.chains, counts), pair, costs);
    }
    reverse(found.chains);
  }
  return seconds[1] < seconds[0] ? StateWay::scan : StateWay::direct;
}

int64_t StatePlan::rounds(Pass pass) const {
  std::set<int64_t> rounds;
  for (const StateSend& send : lists(pass).sends) rounds.insert(send.round);
  return std::ssize(rounds);
}

int64_t StatePlan::sent_bytes(int64_t bytes_per_transition,
                              int64_t bytes_per_state, Pass pass) const {
  check(bytes_per_transition >= 0 && bytes_per_state >= 0, kWho,
        ": transitions of ", bytes_per_transition, " and states of ",
        bytes_per_state, " bytes");
  int64_t states = 0, transitions = 0;
  for (const StateSend& send : lists(pass).sends) {
    if (send.from != rank_) continue;
    ++states;
    transitions += send.transition;
  }
  return (Checked(kWho, states) * bytes_per_state +
          Checked(kWho, transitions) * bytes_per_transition)
      .value();
}

std::string StatePlan::to_string() const {
  return join("StatePlan(", chained_.size(), " of ", runs_.size(),
              " runs of rank ", rank_, " carry a state",
              way_ == StateWay::scan ? ", in rounds)" : ")");
}

const char* name_of(StateWay way) {
  return way == StateWay::scan ? "scan" : "direct";
}

StateWay state_way_named(std::string_view name) {
  const StateWay way = name == "scan" ? StateWay::scan : StateWay::direct;
  check(name == name_of(way), kWho, ": way '", name,
        "' is not one of direct, scan");
  return way;
}

}  // namespace longspan
