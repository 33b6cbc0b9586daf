#include "longspan/core/mask.h"

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/visible_keys.h"

namespace longspan {

namespace {

/// floor(0/r) + floor(1/r) + ... + floor((n-1)/r).
int64_t sum_of_floors(int64_t n, int64_t r) {
  const int64_t whole = n / r;
  return r * (whole * (whole - 1) / 2) + whole * (n - whole * r);
}

TokenRange first_overlapping(const std::vector<TokenRange>& ranges,
                             int64_t token) {
  const auto found = std::ranges::partition_point(
      ranges, [&](TokenRange range) { return range.end <= token; });
  return found != ranges.end() && found->contains(token) ? *found
                                                         : TokenRange{};
}

}  // namespace

Mask::Mask(const Packing& packing, Band band, int64_t ratio)
    : packing_(packing),
      band_(band),
      ratio_(ratio),
      hidden_(std::make_shared<const std::vector<TokenRange>>()),
      groups_(hidden_) {
  check(packing.tokens() <= kMostTokens, "Mask: ", packing.tokens(),
        " tokens; pairs are counted in 64 bits, so at most ", kMostTokens);
  rebuild();
}

Mask Mask::causal(const Packing& packing) {
  return banded(packing, {});
}

Mask Mask::full(const Packing& packing) {
  return banded(packing, {Band::kAll, Band::kAll});
}

Mask Mask::sliding(const Packing& packing, int64_t window) {
  check(window >= 1, "Mask: a sliding window of ", window,
        " keys; expected at least 1 (the query itself)");
  return banded(packing, {std::min(window - 1, Band::kAll), 0});
}

Mask Mask::banded(const Packing& packing, Band band) {
  check(band.before >= 0 && band.after >= 0, "Mask: a band of ", band.before,
        " keys before and ", band.after,
        " after the query; neither may be negative");
  band.before = std::min(band.before, Band::kAll);
  band.after = std::min(band.after, Band::kAll);
  return {packing, band, 0};
}

Mask Mask::compressed(const Packing& packing, int64_t ratio) {
  check(ratio >= 1, "Mask: keys that stand for ", ratio,
        " tokens; expected at least 1");
  return {packing, {}, ratio};
}

Mask Mask::with_hidden(const std::vector<TokenRange>& tokens) const {
  check(ratio_ == 0, "Mask: a compressed mask cannot hide single tokens; ",
        "shorten the documents in the packing instead");
  for (TokenRange range : tokens) {
    check(range.begin >= 0 && range.begin <= range.end &&
              range.end <= packing_.tokens(),
          "Mask: hidden tokens ", range, " of ", packing_.tokens());
  }
  std::vector<TokenRange> all = *hidden_;
  all.insert(all.end(), tokens.begin(), tokens.end());
  Mask mask = *this;
  mask.hidden_ =
      std::make_shared<const std::vector<TokenRange>>(normalized(all));
  mask.rebuild();
  return mask;
}

Mask Mask::with_groups(std::vector<TokenRange> groups) const {
  check(ratio_ == 0, "Mask: a compressed mask has no bidirectional groups");
  groups.insert(groups.end(), groups_->begin(), groups_->end());
  std::ranges::sort(groups, {}, &TokenRange::begin);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    check(groups[i].begin >= 0 && !groups[i].empty() &&
              groups[i].end <= packing_.tokens(),
          "Mask: group ", groups[i], " of ", packing_.tokens(),
          " tokens; groups are not empty and lie inside the stream");
    check(i == 0 || groups[i - 1].end <= groups[i].begin, "Mask: groups ",
          groups[i == 0 ? 0 : i - 1], " and ", groups[i], " overlap");
  }
  Mask mask = *this;
  mask.groups_ =
      std::make_shared<const std::vector<TokenRange>>(std::move(groups));
  return mask;
}

Mask Mask::with_prefix(const std::vector<int64_t>& prefix) const {
  check(std::ssize(prefix) == packing_.documents(), "Mask: ", prefix.size(),
        " prefix lengths for ", packing_.documents(), " documents");
  std::vector<TokenRange> groups;
  for (int64_t d = 0; d < packing_.documents(); ++d) {
    const int64_t length = prefix[static_cast<std::size_t>(d)];
    check(length >= 0 && length <= packing_.length(d), "Mask: a prefix of ",
          length, " tokens in document ", d, " of ", packing_.length(d));
    const int64_t begin = packing_.offset(d);
    if (length > 0) groups.push_back({begin, begin + length});
  }
  return with_groups(std::move(groups));
}

Mask Mask::with_group_reach(GroupReach reach) const {
  Mask mask = *this;
  mask.group_reach_ = reach;
  return mask;
}

Mask Mask::with_pad_queries(PadQueries pad_queries) const {
  Mask mask = *this;
  mask.pad_queries_ = pad_queries;
  return mask;
}

void Mask::rebuild() {
  auto visible = std::make_shared<VisibleKeys>();
  torn_document_ = -1;
  auto hidden = hidden_->begin();
  if (ratio_ > 0) visible->key_offsets.push_back(0);
  for (int64_t d = 0; d < packing_.documents(); ++d) {
    TokenRange rest = packing_.real(d);
    int64_t pieces = 0;
    const auto append = [&](TokenRange piece) {
      visible->append(piece);
      if (!piece.empty() && ++pieces == 2 && torn_document_ < 0) {
        torn_document_ = d;
      }
    };
    while (hidden != hidden_->end() && hidden->end <= rest.begin) ++hidden;
    for (auto hole = hidden; hole != hidden_->end() && hole->begin < rest.end;
         ++hole) {
      append({rest.begin, std::max(rest.begin, hole->begin)});
      rest.begin = std::min(rest.end, hole->end);
    }
    append(rest);
    if (ratio_ > 0) {
      visible->key_offsets.push_back(visible->key_offsets.back() +
                                     packing_.slot(d).size() / ratio_);
    }
  }
  visible_ = std::move(visible);
}

int64_t Mask::keys() const {
  return ratio_ > 0 ? visible_->key_offsets.back() : packing_.tokens();
}

bool Mask::is_visible(int64_t token) const {
  const int64_t piece = visible_->last_piece(token);
  return piece >= 0 &&
         visible_->pieces[static_cast<std::size_t>(piece)].contains(token);
}

bool Mask::sees(int64_t query) const {
  return pad_queries_ == PadQueries::see_document || is_visible(query);
}

TokenRange Mask::group_of(int64_t token) const {
  return first_overlapping(*groups_, token);
}

/// The keys of a document: its slot, or its run of compressed keys.
TokenRange Mask::key_slot(int64_t document) const {
  if (ratio_ == 0) return packing_.slot(document);
  const auto d = static_cast<std::size_t>(document);
  return {visible_->key_offsets[d], visible_->key_offsets[d + 1]};
}

bool Mask::allows(int64_t query, int64_t key) const {
  check_tokens("allows", query, key);
  const Packing::Place place = packing_.locate(query);
  if (place.document == Packing::kTail || !sees(query)) return false;
  if (ratio_ > 0) {
    const TokenRange slot = key_slot(place.document);
    const int64_t complete =
        std::min(place.position + 1, packing_.length(place.document)) / ratio_;
    return slot.contains(key) && key - slot.begin < complete;
  }
  if (packing_.document_of(key) != place.document || !is_visible(key)) {
    return false;
  }
  const bool in_window = query - key <= band_.before;
  if (in_window && key - query <= band_.after) return true;
  return (in_window || group_reach_ == GroupReach::whole_group) &&
         group_of(query).contains(key);
}

std::string Mask::why_not_one_range() const {
  if (is_one_range()) return "";
  return join("document ", torn_document_,
              " has pads between its real tokens, so the keys of a query are "
              "not one range; use key_ranges_of, or move the pads to the ends");
}

/// Band and group of a query inside its document, pads not yet taken out.
TokenRange Mask::band_of(int64_t query) const {
  const Packing::Place place = packing_.locate(query);
  if (place.document == Packing::kTail || !sees(query)) return {};
  const TokenRange slot = key_slot(place.document);
  if (ratio_ > 0) {
    const int64_t complete =
        std::min(place.position + 1, packing_.length(place.document)) / ratio_;
    return {slot.begin, slot.begin + complete};
  }
  TokenRange keys{query - band_.before, query + band_.after + 1};
  const TokenRange group = group_of(query);
  if (!group.empty()) {
    if (group_reach_ == GroupReach::whole_group) {
      keys.begin = std::min(keys.begin, group.begin);
    }
    keys.end = std::max(keys.end, group.end);
  }
  return intersect(keys, slot);
}

TokenRange Mask::keys_of(int64_t query) const {
  check(is_one_range(), "Mask::keys_of: ", why_not_one_range());
  check_tokens("keys_of", query, std::nullopt);
  const TokenRange keys = band_of(query);
  if (keys.empty()) return {};
  if (ratio_ > 0) return keys;
  const TokenRange visible{visible_->first_from(keys.begin),
                           visible_->end_before(keys.end)};
  return visible.begin < visible.end ? visible : TokenRange{};
}

std::vector<TokenRange> Mask::key_ranges_of(int64_t query) const {
  check_tokens("key_ranges_of", query, std::nullopt);
  const TokenRange keys = band_of(query);
  std::vector<TokenRange> ranges;
  if (ratio_ > 0) {
    append_range(ranges, keys);
    return ranges;
  }
  const auto& pieces = visible_->pieces;
  auto piece = std::ranges::partition_point(
      pieces, [&](TokenRange range) { return range.end <= keys.begin; });
  for (; piece != pieces.end() && piece->begin < keys.end; ++piece) {
    append_range(ranges, intersect(*piece, keys));
  }
  return ranges;
}

TokenRange Mask::reach(TokenRange queries) const {
  check_ranges("reach", queries, {});
  queries = intersect(queries, {0, packing_.offsets().back()});
  if (pad_queries_ == PadQueries::see_nothing) {
    queries = {visible_->first_from(queries.begin),
               visible_->end_before(queries.end)};
  }
  if (queries.begin >= queries.end) return {};
  const TokenRange keys{band_of(queries.begin).begin,
                        band_of(queries.end - 1).end};
  if (ratio_ > 0) return keys;
  const TokenRange tight{visible_->first_from(keys.begin),
                         visible_->end_before(keys.end)};
  return tight.begin < tight.end ? tight : TokenRange{};
}

void Mask::check_tokens(const char* who, int64_t query,
                        std::optional<int64_t> key) const {
  check(query >= 0 && query < queries(), "Mask::", who, ": query ", query,
        " of ", queries());
  check(!key || (*key >= 0 && *key < keys()), "Mask::", who, ": key ",
        key.value_or(0), " of ", keys());
}

void Mask::check_ranges(const char* who, TokenRange queries,
                        TokenRange keys) const {
  const auto inside = [](TokenRange range, int64_t end) {
    return range.begin >= 0 && range.begin <= range.end && range.end <= end;
  };
  check(inside(queries, this->queries()), "Mask::", who, ": queries ", queries,
        " of ", this->queries());
  check(inside(keys, this->keys()), "Mask::", who, ": keys ", keys, " of ",
        this->keys());
}

int64_t Mask::pairs(TokenRange queries, TokenRange keys) const {
  check_ranges("pairs", queries, keys);
  const int64_t slots_end = packing_.offsets().back();
  queries = intersect(queries, {0, slots_end});
  if (queries.empty() || keys.empty()) return 0;
  int64_t first = packing_.document_of(queries.begin);
  int64_t last = packing_.document_of(queries.end - 1);
  if (ratio_ == 0) {
    keys = intersect(keys, {0, slots_end});
    if (keys.empty()) return 0;
    first = std::max(first, packing_.document_of(keys.begin));
    last = std::min(last, packing_.document_of(keys.end - 1));
  }
  int64_t total = 0;
  for (int64_t d = first; d <= last; ++d) {
    const TokenRange in_document = intersect(queries, packing_.slot(d));
    const TokenRange of_document = intersect(keys, key_slot(d));
    if (in_document.empty() || of_document.empty()) continue;
    if (ratio_ > 0) {
      total += complete_pairs(d, in_document, of_document);
      continue;
    }
    stretches_in(in_document, of_document, [&](const Stretch& stretch) {
      total += visible_->clamped_sum(stretch.queries, band_.after + 1,
                                     stretch.end_at_least, stretch.keys.end) -
               visible_->clamped_sum(stretch.queries, -band_.before,
                                     stretch.keys.begin, stretch.begin_at_most);
    });
  }
  return total;
}

/// Cuts the queries of one document at pads (unless they see) and at the
/// borders of groups; `keys` are keys of the same document.
void Mask::stretches_in(
    TokenRange queries, TokenRange keys,
    const std::function<void(const Stretch&)>& visit) const {
  const auto over_groups = [&](TokenRange rest) {
    auto group = std::ranges::partition_point(
        *groups_, [&](TokenRange range) { return range.end <= rest.begin; });
    for (; group != groups_->end() && group->begin < rest.end; ++group) {
      const TokenRange grouped = intersect(rest, *group);
      if (rest.begin < grouped.begin) {
        visit({{rest.begin, grouped.begin}, keys, keys.end, keys.begin});
      }
      const int64_t begin_at_most =
          group_reach_ == GroupReach::whole_group ? group->begin : keys.end;
      visit({grouped, keys, std::clamp(begin_at_most, keys.begin, keys.end),
             std::clamp(group->end, keys.begin, keys.end)});
      rest.begin = grouped.end;
    }
    if (!rest.empty()) visit({rest, keys, keys.end, keys.begin});
  };
  if (pad_queries_ == PadQueries::see_document) return over_groups(queries);
  const auto& pieces = visible_->pieces;
  auto piece = std::ranges::partition_point(
      pieces, [&](TokenRange range) { return range.end <= queries.begin; });
  for (; piece != pieces.end() && piece->begin < queries.end; ++piece) {
    over_groups(intersect(queries, *piece));
  }
}

void Mask::for_each_stretch(
    TokenRange queries,
    const std::function<void(const Stretch&)>& visit) const {
  check_ranges("for_each_stretch", queries, {});
  check(ratio_ == 0, "Mask::for_each_stretch: keys are compressed");
  queries = intersect(queries, {0, packing_.offsets().back()});
  if (queries.empty()) return;
  const int64_t last = packing_.document_of(queries.end - 1);
  for (int64_t d = packing_.document_of(queries.begin); d <= last; ++d) {
    const TokenRange slot = packing_.slot(d);
    const TokenRange keys{visible_->first_from(slot.begin),
                          visible_->end_before(slot.end)};
    if (keys.begin < keys.end) {
      stretches_in(intersect(queries, slot), keys, visit);
    }
  }
}

std::vector<TokenRange> Mask::visible_in(TokenRange keys) const {
  check_ranges("visible_in", {}, keys);
  check(ratio_ == 0, "Mask::visible_in: keys are compressed");
  const auto& pieces = visible_->pieces;
  auto piece = std::ranges::partition_point(
      pieces, [&](TokenRange range) { return range.end <= keys.begin; });
  std::vector<TokenRange> visible;
  for (; piece != pieces.end() && piece->begin < keys.end; ++piece) {
    append_range(visible, intersect(*piece, keys));
  }
  return visible;
}

/// Visible pairs where keys stand for ratio_ tokens: a query at position p sees
/// the first floor(min(p + 1, length) / ratio_) keys of its document.
int64_t Mask::complete_pairs(int64_t document, TokenRange queries,
                             TokenRange keys) const {
  const TokenRange real = packing_.real(document);
  const int64_t first_key = key_slot(document).begin;
  const auto clamped = [&](int64_t key) {
    return std::clamp(key, keys.begin, keys.end);
  };
  const TokenRange seeing = intersect(queries, real);
  // Tokens so far, the query included: n in [begin, end).
  const TokenRange so_far{seeing.begin - real.begin + 1,
                          seeing.end - real.begin + 1};
  const TokenRange rising = intersect(
      so_far,
      {(keys.begin - first_key) * ratio_, (keys.end - first_key) * ratio_});
  int64_t total = 0;
  if (!seeing.empty()) {
    total += rising.size() * first_key + sum_of_floors(rising.end, ratio_) -
             sum_of_floors(rising.begin, ratio_);
    const int64_t above =
        std::clamp(so_far.end - (keys.end - first_key) * ratio_, int64_t{0},
                   so_far.size());
    const int64_t below = so_far.size() - rising.size() - above;
    total += above * keys.end + below * keys.begin;
    total -= so_far.size() * clamped(first_key);
  }
  if (pad_queries_ == PadQueries::see_document) {
    const int64_t pads = queries.size() - seeing.size();
    total +=
        pads * (clamped(first_key + real.size() / ratio_) - clamped(first_key));
  }
  return total;
}

Coverage Mask::coverage(TokenRange queries, TokenRange keys) const {
  const int64_t visible = pairs(queries, keys);
  if (visible == 0) return Coverage::none;
  return visible == queries.size() * keys.size() ? Coverage::all
                                                 : Coverage::some;
}

std::string Mask::to_string() const {
  std::string text = "Mask(";
  if (ratio_ > 0) {
    text += join("compressed ", ratio_, ":1");
  } else if (band_ == Band{}) {
    text += "causal";
  } else if (band_ == Band{Band::kAll, Band::kAll}) {
    text += "full";
  } else if (band_.after == 0) {
    text += join("sliding ", band_.before + 1);
  } else {
    const auto side = [](int64_t keys) {
      return keys == Band::kAll ? std::string("all") : std::to_string(keys);
    };
    text += join("band ", side(band_.before), "+", side(band_.after));
  }
  text += join(", ", packing_.tokens(), " tokens, ", packing_.documents(),
               packing_.documents() == 1 ? " document" : " documents");
  if (!hidden_->empty()) {
    text += join(", ", count_tokens(*hidden_), " hidden");
  }
  if (!groups_->empty()) {
    text += join(", ", groups_->size(), " groups");
    if (group_reach_ == GroupReach::within_window) text += " within the window";
  }
  if (pad_queries_ == PadQueries::see_document) text += ", pads see";
  return text + ")";
}

}  // namespace longspan
