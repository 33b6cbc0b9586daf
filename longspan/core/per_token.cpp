#include "longspan/core/per_token.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <type_traits>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"

namespace longspan {

namespace {

void check_range(const char* who, TokenRange range, int64_t tokens) {
  check(range.begin >= 0 && range.begin <= range.end && range.end <= tokens,
        who, ": tokens ", range, " of ", tokens);
}

/// Calls visit(document, part) for each slot that meets a range, range by
/// range, and with Packing::kTail for parts in the tail. Ranges usually follow
/// one another, so the next document is looked for close by first.
template <class Visit>
void for_each_document(const Packing& packing,
                       const std::vector<TokenRange>& ranges,
                       const Visit& visit) {
  const std::span<const int64_t> offsets = packing.offsets();
  const TokenRange slots{0, offsets.back()};
  std::size_t document = 0;
  for (TokenRange range : ranges) {
    TokenRange rest = intersect(range, slots);
    if (!rest.empty()) {
      constexpr int kNear = 4;
      int steps = offsets[document] <= rest.begin ? kNear : 0;
      while (steps > 0 && offsets[document + 1] <= rest.begin) {
        ++document;
        --steps;
      }
      if (steps == 0) {
        document = static_cast<std::size_t>(packing.document_of(rest.begin));
      }
    }
    while (!rest.empty()) {
      const TokenRange part =
          intersect(rest, {offsets[document], offsets[document + 1]});
      if (!part.empty()) visit(static_cast<int64_t>(document), part);
      rest.begin = part.end;
      if (!rest.empty()) ++document;
    }
    const TokenRange tail = intersect(packing.tail(), range);
    if (!tail.empty()) visit(Packing::kTail, tail);
  }
}

void check_ranges(const char* who, const std::vector<TokenRange>& ranges,
                  int64_t tokens) {
  for (TokenRange range : ranges) check_range(who, range, tokens);
}

/// Pads follow the real tokens of a slot, so the real part comes first.
TokenRange real_part(const Packing& packing, int64_t document,
                     TokenRange part) {
  if (document == Packing::kTail) return {part.begin, part.begin};
  return intersect(packing.real(document), part);
}

/// Writes clamp(q + shift, low, high) for q in `queries`: a flat stretch, a
/// rising one, a flat one.
template <class Index>
void write_clamped(TokenRange queries, int64_t shift, int64_t low, int64_t high,
                   Index* out) {
  const auto clamped = [&](int64_t q) {
    return std::clamp(q, queries.begin, queries.end);
  };
  const int64_t rise = clamped(low - shift);
  const int64_t stop = std::max(rise, clamped(high - shift));
  out = std::fill_n(out, rise - queries.begin, static_cast<Index>(low));
  auto value = static_cast<Index>(rise + shift);
  for (int64_t q = rise; q < stop; ++q) *out++ = value++;
  std::fill_n(out, queries.end - stop, static_cast<Index>(high));
}

}  // namespace

void write_positions(const Packing& packing,
                     const std::vector<TokenRange>& ranges, int64_t* out) {
  check_ranges("write_positions", ranges, packing.tokens());
  for_each_document(packing, ranges, [&](int64_t document, TokenRange part) {
    const int64_t begin = document == Packing::kTail ? packing.tail().begin
                                                     : packing.offset(document);
    std::iota(out, out + part.size(), part.begin - begin);
    out += part.size();
  });
}

void write_document_ids(const Packing& packing,
                        const std::vector<TokenRange>& ranges, int64_t* out) {
  check_ranges("write_document_ids", ranges, packing.tokens());
  std::vector<int64_t> ids;
  int64_t id = 0;
  for (int64_t length : packing.lengths()) ids.push_back(id += length > 0);
  for_each_document(packing, ranges, [&](int64_t document, TokenRange part) {
    const int64_t real = real_part(packing, document, part).size();
    if (real > 0) {
      out = std::fill_n(out, real, ids[static_cast<std::size_t>(document)]);
    }
    out = std::fill_n(out, part.size() - real, 0);
  });
}

void write_pads(const Packing& packing, const std::vector<TokenRange>& ranges,
                bool* out) {
  check_ranges("write_pads", ranges, packing.tokens());
  for_each_document(packing, ranges, [&](int64_t document, TokenRange part) {
    const int64_t real = real_part(packing, document, part).size();
    out = std::fill_n(out, real, false);
    out = std::fill_n(out, part.size() - real, true);
  });
}

namespace {

template <class Index>
void write_windows(const Mask& mask, TokenRange range, Index* begin,
                   Index* end) {
  check_range("write_key_windows", range, mask.queries());
  check(mask.is_one_range(), "write_key_windows: ", mask.why_not_one_range());
  if constexpr (std::is_same_v<Index, int32_t>) {
    check(mask.keys() <= std::numeric_limits<int32_t>::max(),
          "write_key_windows: ", mask.keys(),
          " keys do not fit 32-bit windows; use the 64-bit form");
  }
  if (mask.ratio() > 0) {
    for (int64_t q = range.begin; q < range.end; ++q) {
      const TokenRange keys = mask.keys_of(q);
      *begin++ = static_cast<Index>(keys.begin);
      *end++ = static_cast<Index>(keys.end);
    }
    return;
  }
  int64_t written = 0;
  const auto see_nothing_until = [&](int64_t entry) {
    std::fill(begin + written, begin + entry, Index{0});
    std::fill(end + written, end + entry, Index{0});
  };
  mask.for_each_stretch(range, [&](const Mask::Stretch& stretch) {
    const int64_t at = stretch.queries.begin - range.begin;
    see_nothing_until(at);
    written = at + stretch.queries.size();
    write_clamped(stretch.queries, -mask.band().before, stretch.keys.begin,
                  stretch.begin_at_most, begin + at);
    write_clamped(stretch.queries, mask.band().after + 1, stretch.end_at_least,
                  stretch.keys.end, end + at);
    if (stretch.keys.contains(stretch.queries)) {
      return;  // real queries see at least themselves
    }
    for (int64_t i = at; i < written; ++i) {
      if (begin[i] >= end[i]) begin[i] = end[i] = 0;
    }
  });
  see_nothing_until(range.size());
}

}  // namespace

void write_key_windows(const Mask& mask, TokenRange range, int32_t* begin,
                       int32_t* end) {
  write_windows(mask, range, begin, end);
}

void write_key_windows(const Mask& mask, TokenRange range, int64_t* begin,
                       int64_t* end) {
  write_windows(mask, range, begin, end);
}

}  // namespace longspan
