#include <algorithm>
#include <map>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/cells.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/attention_layout.h"
#include "longspan/plan/state_plan.h"

namespace longspan {

namespace {

/// Pairs of ranks and runs that plans may look at before a picture leaves them
/// out, so that time stays bounded.
constexpr double kMostLinks = 4e6;
constexpr int kMostRanks = 1024;
/// Runs that can still be told apart.
constexpr int64_t kMostRuns = 256;
/// Ranks beside each other, so that the numbers between them can be read.
constexpr int kMostColumns = 8;
constexpr int64_t kMostBytes = int64_t{1} << 40;

bool is_too_large(const AttentionLayout& layout) {
  const int ranks = layout.ownership.ranks();
  double runs = 0;
  for (const Mask& mask : layout.masks) {
    runs += static_cast<double>(layout.ownership.ranges_of(0).size()) * ranks +
            static_cast<double>(mask.packing().documents());
  }
  return ranks > kMostRanks || runs * ranks > kMostLinks;
}

void check_states(const AttentionLayout& layout, const StateShape& shape,
                  const DrawOptions& options) {
  check(!layout.masks.empty(), "draw_states: a layout without masks");
  check_together("draw_states", layout.masks[0], layout.ownership);
  check_options(options);
  for (int64_t size : {shape.rows, shape.row_bytes, shape.transition_bytes,
                       shape.state_bytes}) {
    check(size >= 0 && size <= kMostBytes, "draw_states: a shape with ", size,
          " rows or bytes; expected 0 to ", kMostBytes);
  }
}

/// Runs of the first row on the shown ranks, and who holds their neighbours.
RunChart chart_of(const AttentionLayout& layout, const StateShape& shape,
                  const DrawOptions& options) {
  const Ownership& owners = layout.ownership;
  const Packing& packing = layout.masks[0].packing();
  RunChart chart;
  chart.heading = join("Runs: ", counted(packing.documents(), "document"),
                       " over ", counted(owners.ranks(), "rank"));
  chart.tokens = owners.tokens();
  chart.ranks = spread(owners.ranks(), options.rows);
  std::map<int64_t, int> holder;  // of the run that goes on at a token
  int64_t all = 0, going_on = 0;
  for (int rank = 0; rank < owners.ranks(); ++rank) {
    const bool shown = std::ranges::binary_search(chart.ranks, rank);
    for (const DocumentRun& run : runs_of(packing, owners, rank)) {
      ++all;
      const bool begins = run.before_rank == DocumentRun::kNobody;
      if (!begins) {
        ++going_on;
        holder[run.tokens.begin] = rank;
      }
      if (!shown) continue;
      chart.runs.push_back({rank, run.document, run.tokens,
                            begins ? kNoRank : run.before_rank, kNoRank});
    }
  }
  for (DrawnRun& run : chart.runs) {
    const auto next = holder.find(run.tokens.end);
    if (next != holder.end()) run.after = next->second;
  }
  const bool marked = packing.documents() <= options.strip_cells / 2;
  for (int64_t d = 0; marked && d < packing.documents(); ++d) {
    chart.documents.push_back({d, packing.slot(d), packing.length(d)});
  }
  chart.caption =
      going_on > 0
          ? join(counted(all, "run"), ", ", going_on, " of which ",
                 going_on == 1 ? "goes" : "go", " on with a document; the ",
                 "others begin one, with nothing before it.")
          : join(counted(all, "run"), ": no document is cut.");
  if (std::ssize(chart.runs) > kMostRuns) {
    chart.runs.clear();
    chart.ranks.clear();
    chart.caption += " Too many runs to draw.";
  } else if (going_on > 0) {
    chart.caption +=
        shape.state_bytes > 0
            ? " Arrows: what a run leaves behind comes into the next one."
            : " Arrows: the next run looks back at the last tokens of this "
              "one.";
  }
  if (!marked) chart.caption += " Too many documents to mark.";
  if (layout.masks.size() > 1) {
    chart.caption +=
        join(" The first of ", layout.masks.size(), " rows is shown.");
  }
  if (!chart.ranks.empty()) {
    chart.caption += shown_note(static_cast<int>(std::ssize(chart.ranks)),
                                owners.ranks(), "ranks");
  }
  return chart;
}

/// Everything that goes from one rank to another in one pass.
class Traffic {
 public:
  Traffic(const AttentionLayout& layout, const StateShape& shape)
      : shape_(shape) {
    // What is sent is known to every rank.
    const int64_t rows = std::ssize(layout.masks);
    if (shape.state_bytes > 0) {
      states_ = StatePlan::of(layout, 0, rows, shape.way);
    }
    if (shape.rows > 0) {
      halo_ = HaloPlan::of(layout, shape.rows, 0, rows).sends();
    }
  }

  /// " in 3 rounds,", where pairs are combined on their way.
  std::string rounds(Pass pass) const {
    if (states_.way() == StateWay::direct) return "";
    return join(" in ", counted(states_.rounds(pass), "round"), ",");
  }

  std::map<std::pair<int, int>, BorderCell> of(Pass pass) const {
    std::map<std::pair<int, int>, BorderCell> found;
    const auto cell = [&](int64_t from, int64_t to) -> BorderCell& {
      return found[{static_cast<int>(from), static_cast<int>(to)}];
    };
    for (const StateSend& send : states_.lists(pass).sends) {
      BorderCell& one = cell(send.from, send.to);
      one.states += 1;
      one.transitions += send.transition;
      one.bytes +=
          shape_.state_bytes + send.transition * shape_.transition_bytes;
    }
    for (const RowSend& send : halo_) {
      if (send.from == send.to) continue;
      BorderCell& one = pass == Pass::forward ? cell(send.from, send.to)
                                              : cell(send.to, send.from);
      one.rows += send.length;
      one.bytes += send.length * shape_.row_bytes;
    }
    return found;
  }

 private:
  StateShape shape_;
  StatePlan states_;
  std::vector<RowSend> halo_;
};

BorderTable table_of(const Traffic& traffic, int ranks, const StateShape& shape,
                     const DrawOptions& options, Pass pass) {
  BorderTable table;
  const bool forward = pass == Pass::forward;
  const auto cells = traffic.of(pass);
  const std::vector<int> shown =
      spread(ranks, std::min(options.rows, kMostColumns));
  std::map<int, int64_t> sent;
  BorderCell all;
  for (const auto& [pair, cell] : cells) {
    sent[pair.first] += cell.bytes;
    all.states += cell.states;
    all.transitions += cell.transitions;
    all.rows += cell.rows;
    all.bytes += cell.bytes;
  }
  for (int from : shown) {
    BorderRow& row = table.rows.emplace_back();
    row.rank = from;
    row.bytes = sent[from];
    for (int to : shown) {
      const auto found = cells.find({from, to});
      BorderCell cell = found == cells.end() ? BorderCell{} : found->second;
      cell.to = to;
      table.most_bytes = std::max(table.most_bytes, cell.bytes);
      row.cells.push_back(cell);
    }
  }
  table.measure = forward ? Measure::forward_bytes : Measure::backward_bytes;
  table.heading = join("Bytes over borders, ", forward ? "forward" : "backward",
                       ": from rank, to rank");
  table.caption =
      all.states + all.rows == 0
          ? "Nothing is sent."
          : join("In all ", counted(all.bytes, "byte"),
                 forward ? ":" : " of gradients:",
                 shape.state_bytes > 0
                     ? join(" ", counted(all.states, "state"), " and ",
                            counted(all.transitions, "transition"))
                     : "",
                 shape.state_bytes > 0 && shape.rows > 0 ? "," : "",
                 shape.rows > 0 ? join(" ", counted(all.rows, "row"),
                                       " of the convolution")
                                : "",
                 ",", traffic.rounds(pass), " however long the runs are.");
  table.caption +=
      shown_note(static_cast<int>(std::ssize(shown)), ranks, "ranks");
  return table;
}

}  // namespace

Picture draw_states(const AttentionLayout& layout, const StateShape& shape,
                    const DrawOptions& options) {
  check_states(layout, shape, options);
  const Ownership& owners = layout.ownership;
  Picture picture;
  picture.title = join(shape.state_bytes > 0 ? "Runs and states, "
                                             : "Runs and what is before them, ",
                       counted(owners.tokens(), "token"), " over ",
                       counted(owners.ranks(), "rank"), ", ", words_of(owners));
  picture.description =
      join("Which run of a document is whose, and what goes over the borders ",
           "between them. ", owners.to_string(), ", ",
           layout.masks[0].packing().to_string(), ".");
  if (is_too_large(layout)) {
    RunChart chart;
    chart.heading = "Runs";
    chart.caption = "Left out: too many ranks or runs to plan.";
    picture.rows.push_back({PanelColumn{std::move(chart)}});
    return picture;
  }
  picture.rows.push_back({PanelColumn{chart_of(layout, shape, options)}});
  const Traffic traffic(layout, shape);
  for (Pass pass : {Pass::forward, Pass::backward}) {
    picture.rows.push_back(
        {PanelColumn{table_of(traffic, owners.ranks(), shape, options, pass)}});
  }
  return picture;
}

}  // namespace longspan
