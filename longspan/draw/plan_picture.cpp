#include <algorithm>
#include <cmath>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/cells.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/attention_layout.h"

namespace longspan {

namespace {

/// Pairs of ranges that plans may look at before a picture leaves them out, so
/// that time stays bounded for very many ranks or documents.
constexpr double kMostRanges = 4e6;

constexpr const char* kLeftOut = "Left out: too many ranks or ranges to plan.";

/// Steps side by side, so that the numbers in them can be read.
constexpr int kMostSteps = 8;

/// About how many pairs of ranges one plan looks at: those of a team's queries
/// and of all keys that share a document.
double cost_of(const AttentionLayout& layout, const Strategy& strategy) {
  const auto held = static_cast<double>(
      std::max<int64_t>(1, std::ssize(layout.ownership.ranges_of(0))));
  const auto documents = static_cast<double>(
      std::max<int64_t>(1, layout.masks[0].packing().documents()));
  return held * layout.ownership.ranks() * strategy.head_ranks *
         std::max(1.0, held / documents) *
         static_cast<double>(layout.masks.size());
}

/// All ranks, or evenly spaced ones, or none where even those are too many.
std::vector<int> planned_ranks(const AttentionLayout& layout,
                               const Strategy& strategy, int rows) {
  const int ranks = layout.ownership.ranks();
  const double cost = cost_of(layout, strategy);
  for (int count : {ranks, std::min(ranks, rows)}) {
    if (cost * count <= kMostRanges) return spread(ranks, count);
  }
  return {};
}

Plan plan_of(const AttentionLayout& layout, const Strategy& strategy,
             int rank) {
  return Plan::of(layout, strategy, rank, std::ssize(layout.masks));
}

/// A strategy over a group, under the name it was asked for: where the group
/// decided on the teams, one team of all ranks is not renamed.
struct Named {
  Strategy strategy;
  std::string name;
  bool fitted = false;
};

std::string name_of(const Strategy& strategy, int ranks, bool fitted) {
  const auto teams = [&] {
    return join("head_parallel_ring, teams of ", strategy.head_ranks);
  };
  if (fitted) return teams();
  if (strategy.head_ranks == ranks && ranks > 1) return "head_parallel";
  if (strategy.head_ranks == 1 || strategy.transport != KeyTransport::ring) {
    return strategy.to_string();
  }
  return teams();
}

Named named(const Strategy& asked, int ranks, const AttentionShape& shape) {
  const Strategy strategy = asked.over(ranks, shape.key_heads);
  const bool fitted = asked.head_ranks == Strategy::kFitting;
  return {strategy, name_of(strategy, ranks, fitted), fitted};
}

/// Says where fitted teams are another strategy by another name.
std::string team_note(const Named& named, int ranks) {
  const int members = named.strategy.head_ranks;
  if (!named.fitted || ranks == 1) return "";
  if (members == 1) {
    return " No team fits both ranks and key heads: teams of 1 do what ring "
           "does.";
  }
  if (members < ranks) return "";
  return " One team of all ranks does what head_parallel does; head_ranks "
         "makes smaller teams.";
}

std::string stream_words(const AttentionLayout& layout) {
  const Ownership& ownership = layout.ownership;
  std::string words =
      join(counted(ownership.tokens(), "token"), " over ",
           counted(ownership.ranks(), "rank"), ", ", words_of(ownership), ", ",
           words_of(layout.masks[0]));
  if (layout.masks.size() > 1) {
    words += join(" and ", counted(std::ssize(layout.masks) - 1, "other mask"));
  }
  return words;
}

void check_plan(const AttentionLayout& layout, const AttentionShape& shape,
                const DrawOptions& options) {
  check(!layout.masks.empty(), "draw_plan: a layout without masks");
  check_together("draw_plan", layout.masks[0], layout.ownership);
  check_options(options);
  for (int64_t size : {shape.heads, shape.key_heads, shape.head_dim,
                       shape.value_dim, shape.bytes_per_element}) {
    check(size >= 1, "draw_plan: a shape with ", size,
          " heads, channels or bytes; expected at least 1 of each");
  }
  // Every rank sends each of its tokens to every other, in both passes.
  const double most = 4.0 * static_cast<double>(layout.ownership.tokens()) *
                      layout.ownership.ranks() *
                      static_cast<double>(shape.heads) *
                      (static_cast<double>(shape.head_dim) +
                       static_cast<double>(shape.value_dim)) *
                      (static_cast<double>(shape.bytes_per_element) + 4) *
                      static_cast<double>(layout.masks.size());
  check(most < 9e18, "draw_plan: ", stream_words(layout), " with ", shape.heads,
        " heads of ", shape.head_dim,
        " channels: too many bytes to count; plan fewer");
}

PlanFlow flow(const std::vector<PlannedParcel>& parcels, int64_t token_bytes) {
  PlanFlow all;
  for (const PlannedParcel& parcel : parcels) {
    all.peers.push_back(parcel.peer);
    all.tokens += count_tokens(parcel.tokens);
  }
  all.bytes = all.tokens * token_bytes;
  return all;
}

PlanRow row_of(const Plan& plan, const AttentionShape& shape,
               const std::vector<int>& steps) {
  PlanRow row;
  row.rank = plan.rank();
  row.heads = plan.head_share(shape).heads.size();
  row.key_bytes = plan.key_bytes(shape);
  row.gradient_bytes = plan.gradient_bytes(shape);
  for (int i : steps) {
    const PlanStep& step = plan.steps().at(static_cast<std::size_t>(i));
    row.cells.push_back({i, count_tokens(step.keys), step.pairs,
                         flow(step.sends, row.key_bytes),
                         flow(step.arrivals, row.key_bytes),
                         flow(step.returns, row.gradient_bytes),
                         flow(step.homecomings, row.gradient_bytes)});
  }
  const SentBytes forward = plan.sent(shape, Pass::forward);
  const SentBytes backward = plan.sent(shape, Pass::backward);
  row.to_heads = {forward.to_heads, backward.to_heads};
  row.to_tokens = {forward.to_tokens, backward.to_tokens};
  return row;
}

/// Pairs of a rank, averaged over all heads.
double pairs_of(const Plan& plan, const AttentionShape& shape) {
  int64_t pairs = 0;
  for (const PlanStep& step : plan.steps()) pairs += step.pairs;
  return static_cast<double>(pairs) *
         static_cast<double>(plan.head_share(shape).heads.size()) /
         static_cast<double>(shape.heads);
}

/// Bars of one measure, filled plan by plan; only those shown become bars.
class BarsOfPlans {
 public:
  BarsOfPlans(Measure measure, const char* heading) {
    bars_.measure = measure;
    bars_.heading = heading;
  }

  void add(const Plan& plan, int64_t amount, bool shown) {
    bars_.scale = std::max(bars_.scale, amount);
    total_ += static_cast<double>(amount);
    ++count_;
    if (!shown) return;
    const int64_t tokens =
        plan.member_tokens()[static_cast<std::size_t>(plan.member())];
    bars_.bars.push_back({plan.rank(), tokens, amount});
  }

  WorkBars finish(int ranks) {
    bars_.mean = count_ == 0 ? 0 : total_ / count_;
    bars_.caption = join(
        "Most: ", short_count(bars_.scale),
        bars_.scale == 0
            ? ""
            : join(", ",
                   ratio_text(static_cast<double>(bars_.scale), bars_.mean),
                   " x the mean"),
        count_ == ranks ? "." : " of those shown.");
    return std::move(bars_);
  }

 private:
  WorkBars bars_;
  double total_ = 0;
  int count_ = 0;
};

std::string token_note(const std::vector<PlanRow>& rows) {
  PlanRow most;
  for (const PlanRow& row : rows) {
    if (row.key_bytes > most.key_bytes) most = row;
  }
  return join(" A token that travels has ", counted(most.key_bytes, "byte"),
              " of keys and values; their gradients have ", most.gradient_bytes,
              ".");
}

/// Heading and caption of a table whose rows are complete. `note` says which
/// ranks they are.
void finish_table(PlanTable& table, const Named& asked, const Plan& plan,
                  const AttentionShape& shape, const std::string& note) {
  const Strategy& strategy = asked.strategy;
  table.heading = join("What each rank computes and sends: ", asked.name);
  table.head_ranks = strategy.head_ranks;
  for (const PlanRow& row : table.rows) {
    for (const PlanCell& cell : row.cells) {
      table.most_pairs = std::max(table.most_pairs, cell.pairs);
    }
  }
  std::string caption;
  if (strategy.head_ranks > 1) {
    const int64_t members = strategy.head_ranks;
    caption += join(" ", members, " neighbours form a team: each has all ",
                    "queries of the team for up to ",
                    (shape.heads + members - 1) / members, " of ",
                    counted(shape.heads, "head"), ".");
  }
  caption += team_note(asked, plan.ranks());
  if (plan.ranks() > strategy.head_ranks) {
    caption += " Keys travel while a step is computed; gradients go home after";
    caption += " it, backward.";
    caption += token_note(table.rows);
  }
  caption += note;
  caption += shown_note(static_cast<int>(table.rows.front().cells.size()),
                        static_cast<int>(plan.steps().size()), "steps");
  if (!caption.empty()) caption.erase(0, 1);
  table.caption = std::move(caption);
}

std::vector<int> shown_steps(const Plan& plan, const DrawOptions& options) {
  return spread(static_cast<int>(plan.steps().size()),
                std::min(kMostSteps, options.rows));
}

Picture titled(const AttentionLayout& layout, const std::string& what) {
  Picture picture;
  picture.title = join("Plan, ", what, ", ", stream_words(layout));
  picture.description = join(
      "Pairs, messages and bytes, known before anything moves: ", what, ". ",
      layout.ownership.to_string(), ", ", layout.masks[0].to_string(), ".");
  return picture;
}

StrategyRow strategy_row(const AttentionLayout& layout, const Named& asked,
                         const AttentionShape& shape,
                         const std::vector<int>& ranks) {
  StrategyRow row;
  row.name = asked.name;
  double most_pairs = 0;
  const auto count = static_cast<double>(ranks.size());
  for (int rank : ranks) {
    const Plan plan = plan_of(layout, asked.strategy, rank);
    const double pairs = pairs_of(plan, shape);
    const int64_t forward = plan.sent_bytes(shape, Pass::forward);
    const int64_t backward = plan.sent_bytes(shape, Pass::backward);
    row.steps = std::max(row.steps, static_cast<int>(plan.steps().size()));
    row.hops = std::max(row.hops, plan.hops());
    row.mean_pairs += pairs / count;
    most_pairs = std::max(most_pairs, pairs);
    row.most_forward = std::max(row.most_forward, forward);
    row.most_backward = std::max(row.most_backward, backward);
    row.mean_forward += static_cast<double>(forward) / count;
    row.mean_backward += static_cast<double>(backward) / count;
  }
  row.most_pairs = std::llround(most_pairs);
  return row;
}

}  // namespace

Picture draw_plan(const AttentionLayout& layout, const Strategy& asked,
                  const AttentionShape& shape, const DrawOptions& options) {
  check_plan(layout, shape, options);
  const int ranks = layout.ownership.ranks();
  const Named shown_as = named(asked, ranks, shape);
  const Strategy& strategy = shown_as.strategy;
  Picture picture = titled(layout, shown_as.name);
  const std::vector<int> shown = spread(ranks, options.rows);
  const std::vector<int> planned =
      planned_ranks(layout, strategy, options.rows);
  PlanTable table;
  if (planned.empty()) {
    table.heading = "What each rank computes and sends";
    table.caption = kLeftOut;
    picture.rows.push_back({PanelColumn{std::move(table)}});
    return picture;
  }
  BarsOfPlans pairs(Measure::pairs, "Pairs of each rank");
  BarsOfPlans forward(Measure::forward_bytes, "Bytes sent, forward");
  BarsOfPlans backward(Measure::backward_bytes, "Bytes sent, backward");
  for (int rank : planned) {
    const Plan plan = plan_of(layout, strategy, rank);
    const bool is_shown = std::ranges::binary_search(shown, rank);
    if (is_shown) {
      table.rows.push_back(row_of(plan, shape, shown_steps(plan, options)));
    }
    pairs.add(plan, std::llround(pairs_of(plan, shape)), is_shown);
    forward.add(plan, plan.sent_bytes(shape, Pass::forward), is_shown);
    backward.add(plan, plan.sent_bytes(shape, Pass::backward), is_shown);
    if (rank == shown.back()) {
      finish_table(
          table, shown_as, plan, shape,
          shown_note(static_cast<int>(std::ssize(shown)), ranks, "ranks"));
    }
  }
  picture.rows.push_back({PanelColumn{std::move(table)}});
  WorkBars work = pairs.finish(ranks);
  if (strategy.head_ranks > 1) work.caption += " Averaged over all heads.";
  picture.rows.push_back(
      {{std::move(work)}, {forward.finish(ranks)}, {backward.finish(ranks)}});
  return picture;
}

Picture draw_plan_of(const AttentionLayout& layout, const Strategy& asked,
                     int rank, const AttentionShape& shape,
                     const DrawOptions& options) {
  check_plan(layout, shape, options);
  const Named shown_as = named(asked, layout.ownership.ranks(), shape);
  const Strategy& strategy = shown_as.strategy;
  check(cost_of(layout, strategy) <= kMostRanges,
        "draw_plan: ", layout.ownership.to_string(),
        " has too many ranks or ranges to plan");
  const Plan plan = plan_of(layout, strategy, rank);
  PlanTable table;
  table.rows.push_back(row_of(plan, shape, shown_steps(plan, options)));
  finish_table(
      table, shown_as, plan, shape,
      join(" In all the rank sends ",
           short_count(plan.sent_bytes(shape, Pass::forward)),
           " bytes forward and ",
           short_count(plan.sent_bytes(shape, Pass::backward)), " backward."));
  table.heading =
      join("What rank ", rank, " computes and sends: ", shown_as.name);
  Picture picture = titled(layout, join(shown_as.name, ", rank ", rank));
  picture.rows.push_back({PanelColumn{std::move(table)}});
  return picture;
}

Picture draw_plan_of(const Plan& plan, const DrawOptions& options) {
  check_options(options);
  const std::string name =
      join(name_of(plan.strategy(), plan.ranks(), /*fitted=*/false), ", rank ",
           plan.rank(), " of ", plan.ranks());
  PlanTable table;
  table.heading = join("What the rank computes and sends: ", name);
  table.rows.push_back(row_of(plan, {}, shown_steps(plan, options)));
  // Bytes are a matter of heads and channels, which a plan does not know.
  table.rows.front().key_bytes = table.rows.front().gradient_bytes = 0;
  for (PlanCell& cell : table.rows.front().cells) {
    table.most_pairs = std::max(table.most_pairs, cell.pairs);
    for (PlanFlow* flow :
         {&cell.sends, &cell.arrivals, &cell.returns, &cell.homecomings}) {
      flow->bytes = 0;
    }
  }
  table.caption =
      join(counted(std::ssize(plan.steps()), "step"), ".",
           shown_note(static_cast<int>(table.rows.front().cells.size()),
                      static_cast<int>(plan.steps().size()), "steps"));
  Picture picture;
  picture.title = join("Plan, ", name);
  picture.description = plan.to_string();
  picture.rows.push_back({PanelColumn{std::move(table)}});
  return picture;
}

Picture draw_strategies(const AttentionLayout& layout,
                        const std::vector<Strategy>& strategies,
                        const AttentionShape& shape,
                        const DrawOptions& options) {
  check_plan(layout, shape, options);
  check(!strategies.empty(), "draw_strategies: no strategies to compare");
  const int ranks = layout.ownership.ranks();
  StrategyTable table;
  table.heading = "Strategies: the rank that has the most of each";
  table.caption =
      "Hops: steps during which keys travel. Pairs are averaged over all "
      "heads; balance is the most of them over their mean, 1.00 at best. "
      "Bytes are what one rank sends in one pass.";
  std::string sampled, left_out;
  const auto list = [&](std::string& names, const Named& asked) {
    names += join(names.empty() ? "" : "; ", asked.name);
  };
  for (const Strategy& strategy : strategies) {
    const Named asked = named(strategy, ranks, shape);
    const auto planned = planned_ranks(layout, asked.strategy, options.rows);
    if (planned.empty()) {
      list(left_out, asked);
      continue;
    }
    table.rows.push_back(strategy_row(layout, asked, shape, planned));
    if (std::ssize(planned) < ranks) list(sampled, asked);
    table.caption += team_note(asked, ranks);
  }
  if (!sampled.empty()) {
    table.caption += join(" ", std::min(ranks, options.rows), " of ", ranks,
                          " ranks are counted for ", sampled, ".");
  }
  if (!left_out.empty()) {
    table.caption +=
        join(" Left out, too many ranks or ranges to plan: ", left_out, ".");
  }
  Picture picture = titled(layout, "strategies compared");
  picture.rows.push_back({PanelColumn{std::move(table)}});
  return picture;
}

}  // namespace longspan
