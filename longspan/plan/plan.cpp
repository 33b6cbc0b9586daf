#include "longspan/plan/plan.h"

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/checked.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/detail/ring.h"

namespace longspan {

namespace {

using Ranges = std::vector<TokenRange>;

Ranges joined(const Ranges& a, const Ranges& b) {
  Ranges all = a;
  all.insert(all.end(), b.begin(), b.end());
  return normalized(std::move(all));
}

/// A group of ranks that trade heads, seen as one owner of tokens.
struct Teams {
  Teams(const AttentionLayout& layout, const Strategy& strategy, int rank)
      : size(strategy.head_ranks),
        count(layout.ownership.ranks() / size),
        mine(rank / size),
        member(rank % size) {
    for (int team = 0; team < count; ++team) {
      Ranges tokens;
      for (int i = 0; i < size; ++i) {
        for (TokenRange range : layout.ownership.ranges_of(team * size + i)) {
          append_range(tokens, range);
        }
      }
      needs.push_back(layout.needed_by(tokens));
      held.push_back(std::move(tokens));
    }
  }

  int after(int distance) const {
    return ring_owner(mine, (count - distance) % count, count);
  }
  int before(int distance) const { return ring_owner(mine, distance, count); }
  const Ranges& held_by(int team) const {
    return held[static_cast<size_t>(team)];
  }
  const Ranges& needed_by(int team) const {
    return needs[static_cast<size_t>(team)];
  }

  /// The rank of a team that computes the same heads as we do.
  int peer(int team) const { return team * size + member; }

  /// Which of `owner`'s tokens some query of `reader` sees.
  Ranges wanted(int reader, int owner) const {
    return parts_within(held_by(owner), needed_by(reader));
  }

  int size, count, mine, member;
  std::vector<Ranges> held, needs;
};

void add(std::vector<PlannedParcel>& parcels, int peer, Ranges tokens) {
  if (!tokens.empty()) parcels.push_back({peer, std::move(tokens)});
}

/// Everything needed by the teams first, first + 1, ... (around the ring):
/// entry n holds for n + 1 teams.
std::vector<Ranges> needed_onwards(const Teams& teams, int first) {
  std::vector<Ranges> sums;
  for (int n = 0; n < teams.count; ++n) {
    const Ranges& next = teams.needed_by((first + n) % teams.count);
    sums.push_back(n == 0 ? next : joined(sums.back(), next));
  }
  return sums;
}

/// A share goes from neighbour to neighbour and sheds, hop by hop, what no team
/// further on needs. Gradients go straight home.
std::vector<PlanStep> ring_steps(const Teams& teams) {
  std::vector<PlanStep> steps(static_cast<std::size_t>(teams.count));
  steps[0].keys = teams.held_by(teams.mine);
  const auto from_here = needed_onwards(teams, teams.mine);
  const auto from_next = needed_onwards(teams, teams.after(1 % teams.count));
  for (int i = 0; i + 1 < teams.count; ++i) {
    PlanStep& step = steps[static_cast<std::size_t>(i)];
    PlanStep& next = steps[static_cast<std::size_t>(i) + 1];
    // At the next step the share of `owner` has count - 1 - i teams to go.
    const auto left = static_cast<std::size_t>(teams.count - 2 - i);
    add(step.sends, teams.peer(teams.after(1)),
        parts_within(teams.held_by(teams.before(i)), from_next[left]));
    const int owner = teams.before(i + 1);
    next.keys = parts_within(teams.held_by(owner), from_here[left]);
    add(step.arrivals, teams.peer(teams.before(1)), next.keys);
    add(next.returns, teams.peer(owner), teams.wanted(teams.mine, owner));
    const int reader = teams.after(i + 1);
    add(next.homecomings, teams.peer(reader), teams.wanted(reader, teams.mine));
  }
  return steps;
}

/// Own keys first, while those of all others are on their way.
std::vector<PlanStep> gathered_steps(const Teams& teams, bool only_needed) {
  std::vector<PlanStep> steps(teams.count == 1 ? 1 : 2);
  steps[0].keys = teams.held_by(teams.mine);
  for (int team = 0; team < teams.count; ++team) {
    if (team == teams.mine) continue;
    const int peer = teams.peer(team);
    Ranges wanted = teams.wanted(teams.mine, team);
    Ranges theirs = teams.wanted(team, teams.mine);
    add(steps[1].returns, peer, wanted);
    add(steps[1].homecomings, peer, theirs);
    if (!only_needed) wanted = teams.held_by(team);
    if (!only_needed) theirs = teams.held_by(teams.mine);
    steps[1].keys.insert(steps[1].keys.end(), wanted.begin(), wanted.end());
    add(steps[0].sends, peer, std::move(theirs));
    add(steps[0].arrivals, peer, std::move(wanted));
  }
  return steps;
}

int64_t tokens_in(const std::vector<PlannedParcel>& parcels) {
  int64_t tokens = 0;
  for (const PlannedParcel& parcel : parcels) {
    tokens += count_tokens(parcel.tokens);
  }
  return tokens;
}

Checked guarded(int64_t value) {
  return {"Plan", value};
}

/// Bytes of a number that is added up: float32 at least.
int64_t summed_bytes(const AttentionShape& shape) {
  return std::max<int64_t>(shape.bytes_per_element, 4);
}

void check_shape(const AttentionShape& shape) {
  for (int64_t size : {shape.heads, shape.key_heads, shape.head_dim,
                       shape.value_dim, shape.bytes_per_element}) {
    check(size >= 0, "Plan: a shape with ", size,
          " heads, channels or bytes; none of them is negative");
  }
}

std::string listed(const char* verb, const char* preposition,
                   const std::vector<PlannedParcel>& parcels) {
  std::string text;
  for (const PlannedParcel& parcel : parcels) {
    text += join(text.empty() ? verb : ",", " ", count_tokens(parcel.tokens),
                 " ", preposition, " ", parcel.peer);
  }
  return text;
}

/// Refuses a plan whose size is known to be huge before it is made.
void check_size(const AttentionLayout& layout, int64_t rows) {
  const int ranks = layout.ownership.ranks();
  check(ranks <= Plan::kMostRanks, "Plan: ", ranks, " ranks; plans go up to ",
        Plan::kMostRanks);
  check_listable("Plan", layout.ownership);
  check(rows <= Plan::kMostRows, "Plan: ", rows, " rows; plans go up to ",
        Plan::kMostRows);
}

/// Repeats the lines of the first row, which hold for all.
void repeat_lines(std::vector<KeyLines>& lines, int64_t rows) {
  const int64_t each = std::ssize(lines);
  check(each <= Plan::kMostLines / std::max<int64_t>(rows, 1), "Plan: ", rows,
        " rows with ", each, " stretches of queries in a step each; at most ",
        Plan::kMostLines, " are planned, so cut the rows");
  if (each == 0) return;
  lines.reserve(static_cast<std::size_t>(each * rows));
  for (int64_t row = 1; row < rows; ++row) {
    for (int64_t i = 0; i < each; ++i) {
      lines.push_back(lines[static_cast<std::size_t>(i)]);
      lines.back().row = row;
    }
  }
}

uint64_t fingerprint_of(const AttentionLayout& layout, const Strategy& strategy,
                        int64_t rows) {
  uint64_t bits = 0;
  const auto add = [&](int64_t number) {
    bits = (bits ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
    bits ^= bits >> 29;
  };
  for (int64_t number : layout.encode()) add(number);
  add(static_cast<int64_t>(strategy.transport));
  add(strategy.head_ranks);
  add(rows);
  return bits;
}

}  // namespace

std::vector<TokenRange> parts_within(const std::vector<TokenRange>& held,
                                     const std::vector<TokenRange>& some) {
  Ranges parts;
  for (TokenRange range : held) {
    auto at = std::ranges::partition_point(
        some, [&](TokenRange other) { return other.end <= range.begin; });
    for (; at != some.end() && at->begin < range.end; ++at) {
      append_range(parts, intersect(range, *at));
    }
  }
  return parts;
}

std::vector<TokenRange> places_in(const std::vector<TokenRange>& held,
                                  const std::vector<TokenRange>& wanted) {
  struct Placed {
    TokenRange tokens;
    int64_t place;
  };
  std::vector<Placed> sorted;
  int64_t place = 0;
  for (TokenRange range : held) {
    sorted.push_back({range, place});
    place += range.size();
  }
  std::ranges::sort(sorted, {}, [](const Placed& p) { return p.tokens.begin; });
  Ranges places;
  for (TokenRange range : wanted) {
    auto at = std::ranges::partition_point(
        sorted, [&](const Placed& p) { return p.tokens.end <= range.begin; });
    int64_t found = 0;
    for (; at != sorted.end() && at->tokens.begin < range.end; ++at) {
      const TokenRange part = intersect(range, at->tokens);
      const int64_t begin = at->place + part.begin - at->tokens.begin;
      append_range(places, {begin, begin + part.size()});
      found += part.size();
    }
    promise(found == range.size(), "places_in: tokens ", range,
            " are not all held");
  }
  return places;
}

Plan Plan::of(const AttentionLayout& layout, const Strategy& strategy, int rank,
              int64_t rows) {
  const int ranks = layout.ownership.ranks();
  check(rank >= 0 && rank < ranks, "Plan: rank ", rank, " of ", ranks);
  check(strategy.head_ranks >= 1 && ranks % strategy.head_ranks == 0,
        "Plan: ", ranks, " ranks do not form teams of ", strategy.head_ranks);
  check(rows >= 0 &&
            (layout.masks.size() == 1 || std::ssize(layout.masks) == rows),
        "Plan: ", layout.masks.size(), " masks for ", rows,
        " rows; give one for all rows, or one for each");
  check_size(layout, rows);
  Plan plan;
  plan.strategy_ = strategy;
  plan.rank_ = rank;
  plan.ranks_ = ranks;
  plan.rows_ = rows;
  plan.fingerprint_ = fingerprint_of(layout, strategy, rows);
  const Teams teams(layout, strategy, rank);
  for (int i = 0; i < teams.size; ++i) {
    plan.member_tokens_.push_back(
        layout.ownership.local_tokens(plan.first_of_team() + i));
  }
  plan.steps_ =
      strategy.transport == KeyTransport::ring
          ? ring_steps(teams)
          : gathered_steps(teams, strategy.transport == KeyTransport::needed);
  const Ranges& queries = teams.held_by(teams.mine);
  const int64_t masks = std::min(rows, std::ssize(layout.masks));
  int64_t before = 0;  // lines of the steps before
  for (PlanStep& step : plan.steps_) {
    for (int64_t row = 0; row < masks; ++row) {
      const auto lines =
          key_lines(layout.mask_of(row), queries, step.keys, row);
      step.lines.insert(step.lines.end(), lines.begin(), lines.end());
      check(before + std::ssize(step.lines) <= kMostLines, "Plan: more than ",
            kMostLines, " stretches of queries see keys of ", ranks,
            " ranks; deal tokens out in longer ranges, or cut the rows");
    }
    if (layout.masks.size() == 1) repeat_lines(step.lines, rows);
    before += std::ssize(step.lines);
    Checked pairs("Plan", 0);
    for (const KeyLines& line : step.lines) pairs += count_pairs(line);
    step.pairs = pairs.value();
  }
  return plan;
}

int Plan::hops() const {
  int hops = 0;
  for (int i = 0; i < static_cast<int>(steps_.size()); ++i) {
    const PlanStep& step = steps_[static_cast<std::size_t>(i)];
    if (!step.arrivals.empty() || !step.sends.empty()) hops = i + 1;
  }
  return hops;
}

HeadShare Plan::head_share(const AttentionShape& shape) const {
  return HeadShare::of(shape.heads, shape.key_heads, member(),
                       strategy_.head_ranks);
}

int64_t Plan::key_bytes(const AttentionShape& shape) const {
  return (guarded(rows_) * head_share(shape).key_heads.size() *
          (guarded(shape.head_dim) + shape.value_dim) * shape.bytes_per_element)
      .value();
}

int64_t Plan::gradient_bytes(const AttentionShape& shape) const {
  return (guarded(rows_) * head_share(shape).key_heads.size() *
          (guarded(shape.head_dim) + shape.value_dim) * summed_bytes(shape))
      .value();
}

SentBytes Plan::sent(const AttentionShape& shape, Pass pass) const {
  check_shape(shape);
  const Checked element = guarded(shape.bytes_per_element);
  const Checked sum = guarded(summed_bytes(shape));
  const int members = strategy_.head_ranks;
  const HeadShare mine = head_share(shape);
  const Checked query = guarded(shape.head_dim);
  const Checked value = guarded(shape.value_dim);
  const Checked both = query + value;
  Checked keys = guarded(0), gradients = keys, to_heads = keys,
          to_tokens = keys;
  for (const PlanStep& step : steps_) {
    keys += guarded(tokens_in(step.sends)) * key_bytes(shape);
    if (pass == Pass::backward) {
      gradients += guarded(tokens_in(step.returns)) * gradient_bytes(shape);
    }
  }
  for (int other = 0; other < members; ++other) {
    if (other == member()) continue;
    const auto theirs =
        HeadShare::of(shape.heads, shape.key_heads, other, members);
    const auto tokens_of = [&](int who) {
      return guarded(rows_) * member_tokens_[static_cast<std::size_t>(who)];
    };
    const Checked here = tokens_of(member()), there = tokens_of(other);
    const Checked their_heads = guarded(theirs.heads.size());
    const Checked their_keys = guarded(theirs.key_heads.size());
    const Checked my_heads = guarded(mine.heads.size());
    if (pass == Pass::forward) {
      // q, k and v go out; outputs and their log-sum-exp come back.
      to_heads += here * element * (their_heads * query + their_keys * both);
      to_tokens += there * my_heads * (value * element + sum);
    } else {
      // q, k, v, the output and its gradient go out with a log-sum-exp; dq, dk
      // and dv come back.
      to_heads +=
          here * element * (their_heads * (both + value) + their_keys * both);
      to_heads += here * their_heads * sum;
      to_tokens += there * (my_heads * query * element +
                            guarded(mine.key_heads.size()) * both * sum);
    }
  }
  (void)(keys + gradients + to_heads + to_tokens);  // total() counts too
  return {keys.value(), gradients.value(), to_heads.value(), to_tokens.value()};
}

std::string Plan::to_string() const {
  std::string text = join("Plan(", strategy_.to_string(), ", rank ", rank_,
                          " of ", ranks_, ", ", hops(), " hops)");
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const PlanStep& step = steps_[i];
    text += join("\n  step ", i, ": ", count_tokens(step.keys), " keys, ",
                 step.lines.size(), " stretches, ", step.pairs, " pairs");
    for (const std::string& part :
         {listed("; sends", "to", step.sends),
          listed("; gets", "from", step.arrivals),
          listed("; backward returns", "to", step.returns)}) {
      text += part;
    }
  }
  return text;
}

}  // namespace longspan
