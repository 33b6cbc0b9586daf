#include "longspan/plan/state_plan.h"

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
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

/// What a rank needs of one chain: everything before its own last run.
int64_t needed_of(const Chain& chain, int rank) {
  int64_t needed = 0;
  for (int64_t i = 0; i < std::ssize(chain); ++i) {
    if (chain[static_cast<std::size_t>(i)].rank == rank) needed = i;
  }
  return needed;
}

StatePlan::Lists direct_lists(const std::vector<Chain>& chains, int ranks,
                              int rank, int64_t chained_here) {
  StatePlan::Lists lists;
  // Where the pair of a link of another rank lies: by chain and link.
  std::map<std::pair<std::size_t, int64_t>, int64_t> came;
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
        sent.push_back({{0, link.rank, to, link.run, i > 0 ? 1 : 0}, c, i});
      }
    }
    std::ranges::stable_sort(sent, {},
                             [](const Sent& each) { return each.send.from; });
    int64_t place = chained_here;
    for (const Sent& each : sent) {
      lists.sends.push_back(each.send);
      if (to == rank) came[{each.chain, each.link}] = place++;
    }
  }
  for (std::size_t c = 0; c < chains.size(); ++c) {
    const Chain& chain = chains[c];
    const auto mine = [&](const Link& link) { return link.rank == rank; };
    if (std::ranges::none_of(chain, mine)) continue;
    const int64_t needed = needed_of(chain, rank);
    for (int64_t i = 0; i <= needed; ++i) {
      const Link& link = chain[static_cast<std::size_t>(i)];
      StateStep& step = lists.steps.emplace_back();
      if (mine(link)) step.gives = link.run;
      if (i == needed) continue;
      step.place = mine(link) ? link.run : came.at({c, i});
      step.transition = i > 0 ? 1 : 0;
    }
  }
  return lists;
}

/// What all ranks send, and what each of them does with it.
struct Program {
  std::vector<StateSend> sends;
  std::vector<std::vector<StateStep>> steps;  // by rank
};

/// Programs grow round by round. A rank numbers its places as StateStep says.
class Writer {
 public:
  /// `places` are those of each rank that its own runs have.
  explicit Writer(std::vector<int64_t> places) : places_(std::move(places)) {
    program_.steps.resize(places_.size());
  }

  /// Who hears what in a round: a link of a chain.
  struct Hearing {
    StateSend send;
    std::size_t chain;
    int64_t link;
  };

  /// All of a round; gives the places where links find what they heard.
  using Heard = std::map<std::pair<std::size_t, int64_t>, int64_t>;
  Heard exchange(std::vector<Hearing> all) {
    std::ranges::stable_sort(all, {}, [](const Hearing& one) {
      return std::pair{one.send.to, one.send.from};
    });
    Heard heard;
    for (const Hearing& one : all) {
      program_.sends.push_back(one.send);
      heard[{one.chain, one.link}] = place(static_cast<int>(one.send.to))++;
    }
    return heard;
  }

  /// The place that the step keeps, if it does.
  int64_t add(int rank, const StateStep& step) {
    program_.steps[static_cast<std::size_t>(rank)].push_back(step);
    return step.keeps != 0 ? place(rank)++ : StateStep::kNone;
  }

  Program take() { return std::move(program_); }

 private:
  int64_t& place(int rank) { return places_[static_cast<std::size_t>(rank)]; }

  std::vector<int64_t> places_;
  Program program_;
};

/// Of each link the pairs that it knows, as places at its rank.
struct Known {
  int64_t before = StateStep::kNone;  // of the runs right before it
  int64_t with = StateStep::kNone;    // of those and itself
};

Program scan_program(const std::vector<Chain>& chains,
                     const std::vector<int64_t>& chained) {
  Writer writer(chained);
  const auto link = [&](std::size_t chain, int64_t i) -> const Link& {
    return chains[chain][static_cast<std::size_t>(i)];
  };
  std::vector<std::vector<Known>> known;
  int64_t longest = 0;
  for (const Chain& chain : chains) {
    auto& links = known.emplace_back();
    for (const Link& each : chain) links.push_back({.with = each.run});
    longest = std::max(longest, std::ssize(chain));
  }
  for (int64_t round = 0, reach = 1; reach < longest; ++round, reach *= 2) {
    // Link i asks link i - reach for what the `reach` runs that end there make
    // of a state, or all of them where the document begins among them.
    const auto begins = [&](int64_t i) { return i - reach < reach; };
    std::vector<Writer::Hearing> hearing;
    for (std::size_t c = 0; c < chains.size(); ++c) {
      for (int64_t i = reach; i < std::ssize(chains[c]); ++i) {
        const Link &from = link(c, i - reach), &to = link(c, i);
        if (from.rank == to.rank) continue;
        const Known& told = known[c][static_cast<std::size_t>(i - reach)];
        hearing.push_back(
            {{round, from.rank, to.rank, told.with, begins(i) ? 0 : 1}, c, i});
      }
    }
    const auto heard = writer.exchange(std::move(hearing));
    for (std::size_t c = 0; c < chains.size(); ++c) {
      const int64_t links = std::ssize(chains[c]);
      // From the end, so that what a link tells others of this round is not
      // yet what it knows after it.
      for (int64_t i = links - 1; i >= reach; --i) {
        const Link &from = link(c, i - reach), &to = link(c, i);
        Known& mine = known[c][static_cast<std::size_t>(i)];
        StateStep step{.round = round};
        step.place = from.rank == to.rank
                         ? known[c][static_cast<std::size_t>(i - reach)].with
                         : heard.at({c, i});
        step.transition = begins(i) ? 0 : 1;
        writer.add(to.rank, step);
        if (mine.before != StateStep::kNone) {
          writer.add(to.rank,
                     {.round = round, .place = mine.before, .transition = 1});
        }
        // Now at hand: all that lies before it, or twice as much as it knew.
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

/// States and transitions that a rank sends, gets or combines.
struct Amount {
  int64_t states = 0, transitions = 0;
};

/// Of one round, by rank.
struct Load {
  std::map<int, Amount> sent, received, combined;
};

Load direct_load(const std::vector<Chain>& chains) {
  Load load;
  for (const Chain& chain : chains) {
    std::map<int, std::pair<int64_t, int64_t>> ranks;  // last link, and links
    for (int64_t i = 0; i < std::ssize(chain); ++i) {
      auto& [last, own] = ranks[chain[static_cast<std::size_t>(i)].rank];
      last = i;
      ++own;
    }
    // Of link i, how many ranks need it: those whose last one comes later.
    std::vector<int64_t> ends(chain.size());
    for (const auto& [rank, held] : ranks) {
      const auto& [needed, own] = held;
      ++ends[static_cast<std::size_t>(needed)];
      const int64_t states = needed - (own - 1);
      Amount& received = load.received[rank];
      received.states += states;
      const bool first = chain[0].rank != rank;  // which comes without
      received.transitions += states - (first ? 1 : 0);
      load.combined[rank].states += std::max<int64_t>(0, needed - 1);
    }
    int64_t needing = 0;
    for (int64_t i = std::ssize(chain) - 1; i >= 0; --i) {
      const int rank = chain[static_cast<std::size_t>(i)].rank;
      const int64_t others = needing - (ranks[rank].first > i ? 1 : 0);
      Amount& sent = load.sent[rank];
      sent.states += others;
      if (i > 0) sent.transitions += others;
      needing += ends[static_cast<std::size_t>(i)];
    }
  }
  return load;
}

std::map<int64_t, Load> scan_loads(const Program& program) {
  std::map<int64_t, Load> loads;
  for (const StateSend& send : program.sends) {
    Load& load = loads[send.round];
    for (Amount* amount : {&load.sent[static_cast<int>(send.from)],
                           &load.received[static_cast<int>(send.to)]}) {
      amount->states += 1;
      amount->transitions += send.transition;
    }
  }
  for (int rank = 0; rank < std::ssize(program.steps); ++rank) {
    bool at_hand = false, begins = false;
    for (const StateStep& step :
         program.steps[static_cast<std::size_t>(rank)]) {
      if (at_hand && step.place != StateStep::kNone) {
        Amount& combined = loads[step.round].combined[rank];
        combined.states += 1;
        if (!begins) combined.transitions += 1;
      }
      if (!at_hand) begins = step.transition == 0;
      at_hand = step.place != StateStep::kNone;
    }
  }
  return loads;
}

double seconds_of(const Load& load, const StatePair& pair,
                  const StateCosts& costs) {
  const auto most = [&](const std::map<int, Amount>& amounts) {
    double bytes = 0;
    for (const auto& [rank, amount] : amounts) {
      bytes =
          std::max(bytes, static_cast<double>(amount.states) *
                                  static_cast<double>(pair.state_bytes) +
                              static_cast<double>(amount.transitions) *
                                  static_cast<double>(pair.transition_bytes));
    }
    return bytes;
  };
  const bool sends = std::ranges::any_of(
      load.sent, [](const auto& each) { return each.second.states > 0; });
  // Of float32: a number is multiplied and added `matrix_rows` times.
  const double operations =
      most(load.combined) / 4 * 2 * static_cast<double>(pair.matrix_rows);
  return (sends ? costs.exchange_seconds : 0) +
         std::max(most(load.sent), most(load.received)) /
             costs.bytes_per_second +
         operations / costs.operations_per_second;
}

void check_pair(const StatePair& pair) {
  check(pair.transition_bytes >= 0 && pair.state_bytes >= 0 &&
            pair.matrix_rows >= 1,
        kWho, ": transitions of ", pair.transition_bytes, " bytes and ",
        pair.matrix_rows, " rows, and states of ", pair.state_bytes, " bytes");
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
    if (way == StateWay::direct) {
      *lists = direct_lists(found.chains, layout.ownership.ranks(), rank,
                            counts[me]);
    } else {
      Program program = scan_program(found.chains, counts);
      *lists = {std::move(program.sends), std::move(program.steps[me])};
    }
    reverse(found.chains);
  }
  plan.runs_ = std::move(found.runs[me]);
  return plan;
}

double StatePlan::seconds(const AttentionLayout& layout, StateWay way,
                          const StatePair& pair, int64_t rows,
                          const StateCosts& costs) {
  check_rows_of(kWho, layout, 0, rows);
  check_pair(pair);
  Chained found = chained_of(layout, rows);
  const auto counts = found.counts();
  double seconds = 0;
  for (int pass = 0; pass < 2; ++pass) {
    if (way == StateWay::direct) {
      seconds += seconds_of(direct_load(found.chains), pair, costs);
    } else {
      for (const auto& [round, load] :
           scan_loads(scan_program(found.chains, counts))) {
        seconds += seconds_of(load, pair, costs);
      }
    }
    reverse(found.chains);
  }
  return seconds;
}

StateWay StatePlan::choose(const AttentionLayout& layout, const StatePair& pair,
                           int64_t rows, const StateCosts& costs) {
  const double direct = seconds(layout, StateWay::direct, pair, rows, costs);
  const double scan = seconds(layout, StateWay::scan, pair, rows, costs);
  return scan < direct ? StateWay::scan : StateWay::direct;
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
