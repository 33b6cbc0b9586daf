#include <algorithm>
#include <utility>
#include <variant>

#include "longspan/core/detail/check.h"
#include "longspan/draw/detail/cells.h"
#include "longspan/draw/draw.h"

namespace longspan {

namespace {

/// The cells of the stream as one rank sees them: what it holds of each.
Strip rank_strip(const Ownership& ownership, int rank,
                 const std::vector<StripCell>& stream) {
  Strip strip;
  strip.label = join("rank ", rank);
  strip.note = short_count(ownership.local_tokens(rank));
  const std::vector<TokenRange> held = normalized(ownership.ranges_of(rank));
  auto range = held.begin();
  for (StripCell cell : stream) {
    cell.held = 0;
    while (range != held.end() && range->end <= cell.tokens.begin) ++range;
    for (auto at = range; at != held.end() && at->begin < cell.tokens.end;
         ++at) {
      cell.held += intersect(*at, cell.tokens).size();
    }
    cell.rank = cell.held > 0 ? rank : kNoRank;
    strip.cells.push_back(cell);
  }
  return strip;
}

std::string ownership_caption(const Ownership& ownership,
                              const Packing& packing) {
  std::string caption;
  const int64_t pads = packing.tokens() - packing.real_tokens();
  if (packing.documents() != 1) {
    caption += " " + counted(packing.documents(), "document") + ".";
  }
  if (pads > 0) caption += " " + counted(pads, "pad token") + ".";
  const auto empty_documents = std::ranges::count(packing.lengths(), 0);
  if (empty_documents > 0 && packing.tokens() > 0) {
    caption += join(" ", counted(empty_documents, "document"), " without real ",
                    "tokens.");
  }
  if (ownership.kind() == OwnershipKind::ranges || ownership.tokens() == 0) {
    int64_t idle = 0;
    for (int rank = 0; rank < ownership.ranks(); ++rank) {
      idle += ownership.local_tokens(rank) == 0 ? 1 : 0;
    }
    if (idle > 0) caption += " " + counted(idle, "rank") + " without tokens.";
  }
  return caption;
}

}  // namespace

Picture draw_ownership(const Ownership& ownership, const Packing& packing,
                       const DrawOptions& options) {
  check(packing.tokens() == ownership.tokens(), "draw_ownership: a packing of ",
        packing.tokens(), " tokens and an ownership of ", ownership.tokens(),
        "; make both from one stream");
  check_drawable(packing, ownership.ranks());
  check_options(options);

  Strips strips;
  strips.heading = join(ownership.kind() == OwnershipKind::ranges
                            ? "uneven"
                            : to_string(ownership.kind()),
                        ": ", counted(ownership.tokens(), "token"), " over ",
                        counted(ownership.ranks(), "rank"));
  strips.tokens = ownership.tokens();
  const std::vector<StripCell> stream =
      stream_cells(ownership, packing, options.strip_cells);
  strips.strips.push_back({"stream", short_count(ownership.tokens()), stream});
  const std::vector<int> shown = spread(ownership.ranks(), options.rows);
  for (int rank : shown) {
    strips.strips.push_back(rank_strip(ownership, rank, stream));
  }
  if (packing.documents() <= options.strip_cells / 2) {
    for (int64_t d = 0; d < packing.documents(); ++d) {
      strips.documents.push_back({d, packing.slot(d), packing.length(d)});
    }
  }
  strips.caption = ownership_caption(ownership, packing) +
                   cell_note(stream, "token") +
                   shown_note(static_cast<int>(std::ssize(shown)),
                              ownership.ranks(), "ranks");
  if (packing.documents() > options.strip_cells / 2) {
    strips.caption += " Too many documents to mark.";
  }
  if (!strips.caption.empty()) strips.caption.erase(0, 1);

  Picture picture;
  picture.title = "Ownership, " + strips.heading;
  picture.description =
      join("Which rank owns which token. ", ownership.to_string(), ", ",
           packing.to_string(), ". ", strips.caption);
  picture.rows.push_back({PanelColumn{std::move(strips)}});
  return picture;
}

Picture draw_packing(const Packing& packing, const DrawOptions& options) {
  check_options(options);
  check_drawable(packing, 1);
  // Every document as a rank of its own, while colours can tell them apart.
  const bool marked = packing.documents() <= options.strip_cells / 2;
  std::vector<std::vector<TokenRange>> slots;
  for (int64_t d = 0; marked && d < packing.documents(); ++d) {
    slots.push_back({packing.slot(d)});
  }
  const Ownership documents = slots.empty()
                                  ? Ownership::contiguous(packing.tokens(), 1)
                                  : Ownership::of_ranges(std::move(slots));
  Picture picture = draw_ownership(documents, packing, options);
  auto& strips = std::get<Strips>(picture.rows.front().front().front());
  strips.owned = false;
  strips.heading = join(counted(packing.documents(), "document"), ", ",
                        counted(packing.tokens(), "token"));
  strips.strips.resize(1);
  const int64_t pads = packing.tokens() - packing.real_tokens();
  strips.caption = pads > 0 ? counted(pads, "pad token") + "." : "";
  if (!marked) {
    strips.caption +=
        join(strips.caption.empty() ? "" : " ", "Too many documents to mark.");
  }
  picture.title = "Packing, " + strips.heading;
  picture.description =
      join("Documents end to end. ", packing.to_string(), ".");
  return picture;
}

}  // namespace longspan
