#include "json.h"

#include <nlohmann/json.hpp>

namespace longspan::cli {

namespace {

using Json = nlohmann::ordered_json;

Json range(TokenRange tokens) {
  return Json::array({tokens.begin, tokens.end});
}

/// A rank or a step, null for the stand-ins.
Json number_or_null(int number) {
  return number < 0 ? Json() : Json(number);
}

const char* name_of(Coverage coverage) {
  return coverage == Coverage::none  ? "none"
         : coverage == Coverage::all ? "all"
                                     : "some";
}

Json cells_of(const std::vector<StripCell>& cells) {
  Json list = Json::array();
  for (const StripCell& cell : cells) {
    Json one{{"tokens", range(cell.tokens)},
             {"rank", number_or_null(cell.rank)},
             {"held", cell.held}};
    if (cell.pads != Pads::none) {
      one["pads"] = cell.pads == Pads::all ? "all" : "some";
    }
    list.push_back(std::move(one));
  }
  return list;
}

Json panel(const Strips& strips) {
  Json list = Json::array();
  for (const Strip& strip : strips.strips) {
    list.push_back({{"label", strip.label}, {"cells", cells_of(strip.cells)}});
  }
  Json documents = Json::array();
  for (const DocumentMark& mark : strips.documents) {
    documents.push_back({{"document", mark.document},
                         {"slot", range(mark.slot)},
                         {"length", mark.length}});
  }
  return {{"kind", "ownership"},
          {"heading", strips.heading},
          {"caption", strips.caption},
          {"tokens", strips.tokens},
          {"documents", std::move(documents)},
          {"strips", std::move(list)}};
}

/// Visible cells only, row by row.
Json panel(const MaskGrid& grid) {
  Json visible = Json::array();
  for (std::size_t q = 0; q < grid.query_cells.size(); ++q) {
    for (std::size_t k = 0; k < grid.key_cells.size(); ++k) {
      const MaskCell& cell = grid.at(q, k);
      if (cell.coverage == Coverage::none) continue;
      visible.push_back({{"queries", range(grid.query_cells[q].tokens)},
                         {"keys", range(grid.key_cells[k].tokens)},
                         {"coverage", name_of(cell.coverage)},
                         {"rank", number_or_null(cell.rank)},
                         {"step", number_or_null(cell.step)}});
    }
  }
  Json tiles = Json::array();
  for (const StepTile& tile : grid.tiles) {
    tiles.push_back({{"rank", tile.rank},
                     {"step", tile.step},
                     {"owner", tile.owner},
                     {"queries", range(tile.tile.queries)},
                     {"keys", range(tile.tile.keys)},
                     {"coverage", name_of(tile.tile.coverage)}});
  }
  return {{"kind", "mask"},           {"heading", grid.heading},
          {"caption", grid.caption},  {"queries", grid.queries},
          {"keys", grid.keys},        {"cells", std::move(visible)},
          {"tiles", std::move(tiles)}};
}

Json panel(const StepTable& table) {
  Json rows = Json::array();
  for (const StepRow& row : table.rows) {
    Json steps = Json::array();
    for (const StepCell& cell : row.cells) {
      steps.push_back({{"step", cell.step},
                       {"owner", cell.owner},
                       {"pairs", cell.pairs},
                       {"full_tiles", cell.full_tiles},
                       {"masked_tiles", cell.masked_tiles}});
    }
    rows.push_back({{"rank", row.rank}, {"steps", std::move(steps)}});
  }
  return {{"kind", "steps"},
          {"heading", table.heading},
          {"caption", table.caption},
          {"ranks", std::move(rows)}};
}

Json panel(const WorkBars& bars) {
  const bool pairs = bars.measure == Measure::pairs;
  const char* const amount = pairs ? "pairs" : "bytes";
  Json list = Json::array();
  for (const WorkBar& bar : bars.bars) {
    list.push_back(
        {{"rank", bar.rank}, {"tokens", bar.tokens}, {amount, bar.amount}});
  }
  return {{"kind", pairs                                    ? "work"
                   : bars.measure == Measure::forward_bytes ? "sent_forward"
                                                            : "sent_backward"},
          {"heading", bars.heading},
          {"caption", bars.caption},
          {std::string("mean_") + amount, bars.mean},
          {"ranks", std::move(list)}};
}

Json flow(const PlanFlow& flow) {
  return {
      {"peers", flow.peers}, {"tokens", flow.tokens}, {"bytes", flow.bytes}};
}

Json trade(const PlanTrade& trade) {
  return {{"forward_bytes", trade.forward}, {"backward_bytes", trade.backward}};
}

Json panel(const PlanTable& table) {
  Json rows = Json::array();
  for (const PlanRow& row : table.rows) {
    Json steps = Json::array();
    for (const PlanCell& cell : row.cells) {
      steps.push_back({{"step", cell.step},
                       {"keys", cell.keys},
                       {"pairs", cell.pairs},
                       {"sends", flow(cell.sends)},
                       {"arrivals", flow(cell.arrivals)},
                       {"returns", flow(cell.returns)},
                       {"homecomings", flow(cell.homecomings)}});
    }
    rows.push_back({{"rank", row.rank},
                    {"heads", row.heads},
                    {"to_heads", trade(row.to_heads)},
                    {"steps", std::move(steps)},
                    {"to_tokens", trade(row.to_tokens)}});
  }
  return {{"kind", "plan"},
          {"heading", table.heading},
          {"caption", table.caption},
          {"head_ranks", table.head_ranks},
          {"ranks", std::move(rows)}};
}

Json panel(const StrategyTable& table) {
  Json rows = Json::array();
  for (const StrategyRow& row : table.rows) {
    rows.push_back({{"strategy", row.name},
                    {"steps", row.steps},
                    {"hops", row.hops},
                    {"most_pairs", row.most_pairs},
                    {"mean_pairs", row.mean_pairs},
                    {"most_forward_bytes", row.most_forward},
                    {"mean_forward_bytes", row.mean_forward},
                    {"most_backward_bytes", row.most_backward},
                    {"mean_backward_bytes", row.mean_backward}});
  }
  return {{"kind", "strategies"},
          {"heading", table.heading},
          {"caption", table.caption},
          {"strategies", std::move(rows)}};
}

Json panel(const RunChart& chart) {
  Json runs = Json::array();
  for (const DrawnRun& run : chart.runs) {
    runs.push_back({{"rank", run.rank},
                    {"document", run.document},
                    {"tokens", range(run.tokens)},
                    {"before", number_or_null(run.before)},
                    {"after", number_or_null(run.after)}});
  }
  return {{"kind", "runs"},
          {"heading", chart.heading},
          {"caption", chart.caption},
          {"tokens", chart.tokens},
          {"runs", std::move(runs)}};
}

/// Cells that something is sent in only.
Json panel(const BorderTable& table) {
  const bool forward = table.measure == Measure::forward_bytes;
  Json rows = Json::array();
  for (const BorderRow& row : table.rows) {
    Json cells = Json::array();
    for (const BorderCell& cell : row.cells) {
      if (cell.states + cell.rows == 0) continue;
      cells.push_back({{"to", cell.to},
                       {"states", cell.states},
                       {"transitions", cell.transitions},
                       {"rows", cell.rows},
                       {"bytes", cell.bytes}});
    }
    rows.push_back({{"rank", row.rank},
                    {"bytes", row.bytes},
                    {"sends", std::move(cells)}});
  }
  return {{"kind", forward ? "borders_forward" : "borders_backward"},
          {"heading", table.heading},
          {"caption", table.caption},
          {"ranks", std::move(rows)}};
}

}  // namespace

std::string to_json(const Picture& picture) {
  Json panels = Json::array();
  for (const Panel* one : panels_of(picture)) {
    panels.push_back(
        std::visit([](const auto& what) { return panel(what); }, *one));
  }
  const Json all{{"title", picture.title},
                 {"description", picture.description},
                 {"panels", std::move(panels)}};
  return all.dump(1) + "\n";
}

}  // namespace longspan::cli
