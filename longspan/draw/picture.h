#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "longspan/core/coverage.h"
#include "longspan/core/tile.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// Stand-ins for a rank or a step in a drawn cell.
inline constexpr int kNoRank = -1;     ///< nobody, or not a matter of ranks
inline constexpr int kManyRanks = -2;  ///< a cell whose tokens have many owners
inline constexpr int kNoStep = -1;

/// Whether a cell holds real tokens only, both, or pads only.
enum class Pads { none, some, all };

/// A run of tokens drawn as one cell: a single token when the stream is small.
/// In the strip of one rank, `held` counts the tokens of the cell on that rank
/// and `rank` is kNoRank where it is 0.
struct StripCell {
  TokenRange tokens;
  int rank = kNoRank;
  int64_t held = 0;
  Pads pads = Pads::none;
  friend bool operator==(const StripCell&, const StripCell&) = default;
};

/// Cells that cover a stream from its first token to its last, once each.
struct Strip {
  std::string label;
  std::string note;
  std::vector<StripCell> cells;
};

/// A document's slot, whose first `length` tokens are real.
struct DocumentMark {
  int64_t document = 0;
  TokenRange slot;
  int64_t length = 0;
};

/// Who owns which token: the stream first, then one strip for each shown rank.
/// All strips have the same cells. Where nobody owns them yet, the stream
/// stands alone and the ranks of its cells are documents.
struct Strips {
  std::string heading;
  std::string caption;
  bool owned = true;
  int64_t tokens = 0;
  std::vector<Strip> strips;
  std::vector<DocumentMark> documents;  ///< empty when too many to draw
};

/// Query cell x key cell: what is visible, who computes it and at which ring
/// step. `step` is kNoStep where the keys have many owners or none.
struct MaskCell {
  Coverage coverage = Coverage::none;
  int rank = kNoRank;
  int step = kNoStep;
};

/// A tile with the rank that computes it and the ring step it does so at.
struct StepTile {
  int rank = 0;
  int step = 0;
  int owner = 0;
  Tile tile;
};

/// Queries downwards, keys to the right.
struct MaskGrid {
  std::string heading;
  std::string caption;
  int64_t queries = 0;
  int64_t keys = 0;
  std::vector<StripCell> query_cells;
  std::vector<StripCell> key_cells;
  std::vector<MaskCell> cells;         ///< row by row, one row a query cell
  std::vector<StepTile> tiles;         ///< all of tiles_of, or none at all
  std::vector<int64_t> query_borders;  ///< where documents meet
  std::vector<int64_t> key_borders;

  const MaskCell& at(std::size_t query, std::size_t key) const {
    return cells[query * key_cells.size() + key];
  }
};

/// What one rank does at one ring step.
struct StepCell {
  int step = 0;
  int owner = 0;
  int64_t pairs = 0;
  int64_t full_tiles = 0;    ///< Coverage::all
  int64_t masked_tiles = 0;  ///< Coverage::some
};

struct StepRow {
  int rank = 0;
  std::vector<StepCell> cells;
};

/// Shown ranks downwards, shown steps to the right.
struct StepTable {
  std::string heading;
  std::string caption;
  std::vector<StepRow> rows;
  int64_t most_pairs = 0;  ///< the largest cell
};

/// What bars measure, for each rank.
enum class Measure { pairs, forward_bytes, backward_bytes };

struct WorkBar {
  int rank = 0;
  int64_t tokens = 0;
  int64_t amount = 0;
};

/// Visible pairs (or bytes sent) of each shown rank; a bar of `scale` is full
/// length.
struct WorkBars {
  std::string heading;
  std::string caption;
  std::vector<WorkBar> bars;
  double mean = 0;
  int64_t scale = 0;
  Measure measure = Measure::pairs;
};

/// Tokens that go one way while a step runs, and the ranks at the other end.
struct PlanFlow {
  std::vector<int> peers;
  int64_t tokens = 0;
  int64_t bytes = 0;
};

/// What one rank does at one step of its plan. Pairs are those of its team's
/// queries, for the heads that the rank computes.
struct PlanCell {
  int step = 0;
  int64_t keys = 0;
  int64_t pairs = 0;
  PlanFlow sends, arrivals;
  PlanFlow returns, homecomings;  ///< gradients, backward
};

/// Bytes that a rank trades inside its team, sent in each pass.
struct PlanTrade {
  int64_t forward = 0;
  int64_t backward = 0;
};

struct PlanRow {
  int rank = 0;
  int64_t heads = 0;           ///< that the rank computes
  int64_t key_bytes = 0;       ///< of one token that travels
  int64_t gradient_bytes = 0;  ///< of one whose gradients go home
  std::vector<PlanCell> cells;
  PlanTrade to_heads, to_tokens;
};

/// Shown ranks downwards, shown steps to the right: all ranks have the same
/// ones. With teams the trades stand before and after.
struct PlanTable {
  std::string heading;
  std::string caption;
  int head_ranks = 1;
  std::vector<PlanRow> rows;
  int64_t most_pairs = 0;  ///< the largest cell
};

/// What a strategy costs: the heaviest rank, and the mean of all. Pairs are
/// averaged over all heads, so that a rank which computes a quarter of the
/// heads has a quarter of the pairs.
struct StrategyRow {
  std::string name;
  int steps = 0;
  int hops = 0;
  int64_t most_pairs = 0;
  double mean_pairs = 0;
  int64_t most_forward = 0, most_backward = 0;  ///< bytes sent
  double mean_forward = 0, mean_backward = 0;
};

/// Strategies downwards.
struct StrategyTable {
  std::string heading;
  std::string caption;
  std::vector<StrategyRow> rows;
};

/// A contiguous piece of a document on one rank, and who holds the runs of the
/// document before and after it: kNoRank where the document begins or ends.
struct DrawnRun {
  int rank = 0;
  int64_t document = 0;
  TokenRange tokens;
  int before = kNoRank;
  int after = kNoRank;
  friend bool operator==(const DrawnRun&, const DrawnRun&) = default;
};

/// Shown ranks downwards, each with its runs in the stream: where documents
/// begin, and where they go on with what another run hands them.
struct RunChart {
  std::string heading;
  std::string caption;
  int64_t tokens = 0;
  std::vector<int> ranks;
  std::vector<DrawnRun> runs;           ///< of these ranks, in local order
  std::vector<DocumentMark> documents;  ///< empty when too many to draw
};

/// What one rank sends to another for the borders of runs.
struct BorderCell {
  int to = 0;
  int64_t states = 0;
  int64_t transitions = 0;
  int64_t rows = 0;  ///< tokens that a convolution looks back at
  int64_t bytes = 0;
};

struct BorderRow {
  int rank = 0;
  int64_t bytes = 0;  ///< to all ranks, also those that are not shown
  std::vector<BorderCell> cells;
};

/// Shown ranks that send downwards, the same ones to the right; one pass.
struct BorderTable {
  std::string heading;
  std::string caption;
  Measure measure = Measure::forward_bytes;
  std::vector<BorderRow> rows;
  int64_t most_bytes = 0;  ///< the largest cell
};

using Panel = std::variant<Strips, MaskGrid, StepTable, WorkBars, PlanTable,
                           StrategyTable, RunChart, BorderTable>;
using PanelColumn = std::vector<Panel>;

/// What is drawn, before anyone decides how: rows of columns of panels. to_svg
/// and to_text say the same thing because they read the same value.
struct Picture {
  std::string title;
  std::string description;
  std::vector<std::vector<PanelColumn>> rows;
};

/// All panels in reading order.
std::vector<const Panel*> panels_of(const Picture& picture);

/// Two pictures as two columns under one title, their bars of work to one
/// scale.
Picture beside(const Picture& left, const Picture& right);

/// "904", "12345", then three digits: "24.4M", "1.22T".
std::string short_count(int64_t count);

/// "1.26": largest over mean, the number that a balanced plan brings to 1.00.
std::string ratio_text(double most, double mean);

/// "1 2 3", or "15 ranks" where a list would take more than `most` letters.
std::string peers_text(const std::vector<int>& peers, std::size_t most);

/// Text cut into lines of at most `columns` letters at spaces.
std::vector<std::string> wrapped(std::string_view text, std::size_t columns);

}  // namespace longspan
