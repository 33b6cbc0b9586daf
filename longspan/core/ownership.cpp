#include "longspan/core/ownership.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/search.h"

namespace longspan {

namespace {

constexpr std::array kNames{
    std::pair{OwnershipKind::contiguous, std::string_view{"contiguous"}},
    std::pair{OwnershipKind::head_tail, std::string_view{"head-tail"}},
    std::pair{OwnershipKind::per_document_head_tail,
              std::string_view{"per-document-head-tail"}},
    std::pair{OwnershipKind::ranges, std::string_view{"ranges"}},
};

void check_ranks(int ranks) {
  check(ranks >= 1, "Ownership: ", ranks, " ranks; expected at least 1");
}

void check_tokens(int64_t tokens) {
  check(tokens >= 0, "Ownership: ", tokens, " tokens; expected at least 0");
}

void check_sum(int64_t tokens, int64_t more) {
  check(more <= std::numeric_limits<int64_t>::max() - tokens,
        "Ownership: the ranks hold more tokens than 64 bits count");
}

}  // namespace

std::string_view to_string(OwnershipKind kind) {
  for (auto [named, name] : kNames) {
    if (named == kind) return name;
  }
  throw InternalError("an OwnershipKind without a name");
}

std::optional<OwnershipKind> ownership_kind(std::string_view name) {
  for (auto [kind, known] : kNames) {
    if (known == name) return kind;
  }
  return std::nullopt;
}

int64_t tokens_multiple(OwnershipKind kind, int ranks) {
  check_ranks(ranks);
  switch (kind) {
    case OwnershipKind::contiguous:
      return ranks;
    case OwnershipKind::head_tail:
    case OwnershipKind::per_document_head_tail:
      return int64_t{2} * ranks;
    case OwnershipKind::ranges:
      return 1;
  }
  throw InternalError("an OwnershipKind without a multiple");
}

/// What every rank holds, rank after rank, and the same sorted by token.
struct Ownership::Ranges {
  std::vector<TokenRange> held;
  std::vector<int64_t> first_local;    // of held[i] on its rank
  std::vector<int64_t> first_held;     // ranks + 1, into held
  std::vector<int64_t> tokens_before;  // ranks + 1
  std::vector<int64_t> begins;         // of held in token order, ascending
  std::vector<int64_t> order;          // the index into held
};

Ownership Ownership::contiguous(int64_t tokens, int ranks) {
  check_ranks(ranks);
  check_tokens(tokens);
  check(tokens % ranks == 0, "Ownership: ", tokens,
        " tokens do not split over ", ranks, " ranks in equal parts; pad to ",
        round_up(tokens, ranks));
  return {OwnershipKind::contiguous, tokens, ranks};
}

Ownership Ownership::head_tail(int64_t tokens, int ranks) {
  check_ranks(ranks);
  check_tokens(tokens);
  const int64_t multiple = tokens_multiple(OwnershipKind::head_tail, ranks);
  check(tokens % multiple == 0, "Ownership: ", tokens,
        " tokens do not split over ", ranks,
        " ranks in 2 equal parts each; pad to ", round_up(tokens, multiple));
  Ownership ownership(OwnershipKind::head_tail, tokens, ranks);
  ownership.packing_ = Packing::single(tokens);
  return ownership;
}

Ownership Ownership::per_document_head_tail(const Packing& packing, int ranks) {
  check_ranks(ranks);
  const int64_t multiple = tokens_multiple(OwnershipKind::head_tail, ranks);
  for (int64_t d = 0; d < packing.documents(); ++d) {
    const int64_t slot = packing.slot(d).size();
    check(slot % multiple == 0, "Ownership: document ", d, " has a slot of ",
          slot, " tokens, which does not split over ", ranks,
          " ranks in 2 equal parts each; pad it to ", round_up(slot, multiple));
  }
  const int64_t tail = packing.tail().size();
  check(tail % multiple == 0, "Ownership: the ", tail,
        " tokens after the last document do not split over ", ranks,
        " ranks in 2 equal parts each; pad them to ", round_up(tail, multiple));
  Ownership ownership(OwnershipKind::per_document_head_tail, packing.tokens(),
                      ranks);
  ownership.packing_ = packing;
  return ownership;
}

Ownership Ownership::of_sizes(const std::vector<int64_t>& sizes) {
  std::vector<std::vector<TokenRange>> ranges;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    check(size >= 0, "Ownership: a rank of ", size,
          " tokens; sizes are not negative");
    check_sum(begin, size);
    ranges.push_back({{begin, begin + size}});
    begin += size;
  }
  return of_ranges(std::move(ranges));
}

Ownership Ownership::of_ranges(std::vector<std::vector<TokenRange>> ranges) {
  check(!ranges.empty(), "Ownership: no ranks; expected at least 1");
  check(ranges.size() <= 1U << 30, "Ownership: ", ranges.size(), " ranks");
  auto data = std::make_shared<Ranges>();
  data->first_held.push_back(0);
  data->tokens_before.push_back(0);
  for (const auto& of_rank : ranges) {
    std::vector<TokenRange> joined;
    for (TokenRange range : of_rank) {
      check(range.begin >= 0 && range.begin <= range.end, "Ownership: ", range,
            " is not a range of tokens");
      append_range(joined, range);
    }
    int64_t local = 0;
    for (TokenRange range : joined) {
      data->held.push_back(range);
      data->first_local.push_back(local);
      check_sum(data->tokens_before.back() + local, range.size());
      local += range.size();
    }
    data->first_held.push_back(std::ssize(data->held));
    data->tokens_before.push_back(data->tokens_before.back() + local);
  }
  data->order.resize(data->held.size());
  for (std::size_t i = 0; i < data->order.size(); ++i) {
    data->order[i] = static_cast<int64_t>(i);
  }
  const auto begin_of = [&](int64_t i) {
    return data->held[static_cast<std::size_t>(i)].begin;
  };
  std::ranges::sort(data->order, {}, begin_of);
  int64_t next = 0;
  for (int64_t i : data->order) {
    const TokenRange range = data->held[static_cast<std::size_t>(i)];
    check(range.begin >= next, "Ownership: token ", range.begin,
          " has two owners");
    check(range.begin <= next, "Ownership: token ", next, " has no owner");
    data->begins.push_back(range.begin);
    next = range.end;
  }
  Ownership ownership(OwnershipKind::ranges, next,
                      static_cast<int>(ranges.size()));
  ownership.ranges_data_ = std::move(data);
  return ownership;
}

Ownership Ownership::of(OwnershipKind kind, const Packing& packing, int ranks) {
  switch (kind) {
    case OwnershipKind::contiguous:
      return contiguous(packing.tokens(), ranks);
    case OwnershipKind::head_tail:
      return head_tail(packing.tokens(), ranks);
    case OwnershipKind::per_document_head_tail:
      return per_document_head_tail(packing, ranks);
    case OwnershipKind::ranges:
      break;
  }
  throw std::invalid_argument(
      "Ownership: 'ranges' has no closed form; use of_ranges or of_sizes");
}

void Ownership::check_rank(const char* who, int rank) const {
  check(rank >= 0 && rank < ranks_, "Ownership::", who, ": rank ", rank, " of ",
        ranks_);
}

int64_t Ownership::local_tokens(int rank) const {
  check_rank("local_tokens", rank);
  if (kind_ != OwnershipKind::ranges) return tokens_ / ranks_;
  const auto r = static_cast<std::size_t>(rank);
  return ranges_data_->tokens_before[r + 1] - ranges_data_->tokens_before[r];
}

int64_t Ownership::first_of(int rank) const {
  check_rank("first_of", rank);
  if (kind_ != OwnershipKind::ranges) return tokens_ / ranks_ * rank;
  return ranges_data_->tokens_before[static_cast<std::size_t>(rank)];
}

/// The tokens that are cut into 2N chunks together: a slot, or the tail.
TokenRange Ownership::unit(int64_t document) const {
  return document == Packing::kTail ? packing_.tail() : packing_.slot(document);
}

void Ownership::check_token(int64_t token) const {
  check(token >= 0 && token < tokens_, "Ownership: token ", token, " of ",
        tokens_);
}

Ownership::Place Ownership::locate(int64_t token) const {
  check_token(token);
  if (kind_ == OwnershipKind::contiguous) {
    const int64_t share = tokens_ / ranks_;
    return {static_cast<int>(token / share), token % share};
  }
  if (kind_ == OwnershipKind::ranges) {
    const Ranges& data = *ranges_data_;
    const int64_t place = last_not_above(data.begins, token);
    const auto held =
        static_cast<std::size_t>(data.order[static_cast<std::size_t>(place)]);
    const auto rank =
        std::ranges::upper_bound(data.first_held, static_cast<int64_t>(held)) -
        data.first_held.begin() - 1;
    return {static_cast<int>(rank),
            data.first_local[held] + token - data.held[held].begin};
  }
  const Chunk chunk = chunk_at(token);
  const bool in_tail =
      chunk.range.begin - chunk.cut.begin >= chunk.cut.size() / 2;
  return {chunk.rank, chunk.cut.begin / ranks_ +
                          (in_tail ? chunk.range.size() : 0) +
                          (token - chunk.range.begin)};
}

int Ownership::owner_of(int64_t token) const {
  return locate(token).rank;
}

int64_t Ownership::local_of(int64_t token) const {
  return locate(token).local;
}

int64_t Ownership::global_of(int rank, int64_t local) const {
  check_rank("global_of", rank);
  check(local >= 0 && local < local_tokens(rank),
        "Ownership::global_of: local ", local, " of ", local_tokens(rank),
        " on rank ", rank);
  if (kind_ == OwnershipKind::contiguous) return first_of(rank) + local;
  if (kind_ == OwnershipKind::ranges) {
    const Ranges& data = *ranges_data_;
    const auto first = data.first_local.begin();
    const auto found = std::upper_bound(
        first + data.first_held[static_cast<std::size_t>(rank)],
        first + data.first_held[static_cast<std::size_t>(rank) + 1], local);
    const auto held = static_cast<std::size_t>(found - first - 1);
    return data.held[held].begin + local - data.first_local[held];
  }
  // Slots start at N times their local start, so local * N lies in the slot
  // (or tail) that the local token belongs to.
  const TokenRange cut = unit(packing_.document_of(local * ranks_));
  const int64_t chunk_size = cut.size() / (int64_t{2} * ranks_);
  const int64_t inside = local - cut.begin / ranks_;
  const int64_t chunk =
      inside < chunk_size ? rank : int64_t{2} * ranks_ - 1 - rank;
  return cut.begin + chunk * chunk_size + inside % chunk_size;
}

std::vector<TokenRange> Ownership::ranges_of(int rank) const {
  check_rank("ranges_of", rank);
  std::vector<TokenRange> ranges;
  if (kind_ == OwnershipKind::contiguous) {
    append_range(ranges, {first_of(rank), first_of(rank) + local_tokens(rank)});
    return ranges;
  }
  if (kind_ == OwnershipKind::ranges) {
    const auto first = ranges_data_->held.begin();
    const auto& bounds = ranges_data_->first_held;
    const auto r = static_cast<std::size_t>(rank);
    return {first + bounds[r], first + bounds[r + 1]};
  }
  ranges.reserve(static_cast<std::size_t>(2 * packing_.documents() + 2));
  const auto append_unit = [&](TokenRange cut) {
    const int64_t chunk_size = cut.size() / (int64_t{2} * ranks_);
    const int64_t head = cut.begin + chunk_size * rank;
    const int64_t tail =
        cut.begin + chunk_size * (int64_t{2} * ranks_ - 1 - rank);
    append_range(ranges, {head, head + chunk_size});
    append_range(ranges, {tail, tail + chunk_size});
  };
  for (int64_t d = 0; d < packing_.documents(); ++d) {
    append_unit(packing_.slot(d));
  }
  append_unit(packing_.tail());
  return ranges;
}

/// The chunk that holds a token, before neighbours are joined.
Ownership::Chunk Ownership::chunk_at(int64_t token) const {
  const TokenRange cut = unit(packing_.document_of(token));
  const int64_t chunk_size = cut.size() / (int64_t{2} * ranks_);
  const int64_t chunk = (token - cut.begin) / chunk_size;
  const int64_t begin = cut.begin + chunk * chunk_size;
  return {static_cast<int>(std::min(chunk, int64_t{2} * ranks_ - 1 - chunk)),
          {begin, begin + chunk_size},
          cut};
}

Ownership::Holding Ownership::holding(int64_t token) const {
  if (kind_ == OwnershipKind::contiguous) {
    const Place place = locate(token);
    const int64_t begin = token - place.local;
    return {place.rank, {begin, begin + tokens_ / ranks_}};
  }
  if (kind_ == OwnershipKind::ranges) {
    const int rank = locate(token).rank;
    const Ranges& data = *ranges_data_;
    const auto sorted =
        static_cast<std::size_t>(last_not_above(data.begins, token));
    return {rank, data.held[static_cast<std::size_t>(data.order[sorted])]};
  }
  check_token(token);
  if (ranks_ == 1) return {0, {0, tokens_}};
  const Chunk chunk = chunk_at(token);
  Holding found{chunk.rank, chunk.range};
  while (found.range.begin > 0) {
    const Chunk before = chunk_at(found.range.begin - 1);
    if (before.rank != found.rank) break;
    found.range.begin = before.range.begin;
  }
  while (found.range.end < tokens_) {
    const Chunk after = chunk_at(found.range.end);
    if (after.rank != found.rank) break;
    found.range.end = after.range.end;
  }
  return found;
}

int64_t Ownership::most_ranges() const {
  switch (kind_) {
    case OwnershipKind::contiguous:
      return ranks_;
    case OwnershipKind::head_tail:
    case OwnershipKind::per_document_head_tail:
      return int64_t{2} * ranks_ * (packing_.documents() + 1);
    case OwnershipKind::ranges:
      return std::max<int64_t>(ranks_, std::ssize(ranges_data_->held));
  }
  throw InternalError("an OwnershipKind without ranges");
}

void check_listable(const char* who, const Ownership& ownership) {
  check(ownership.most_ranges() <= kMostListedRanges, who, ": ",
        ownership.to_string(), " has up to ", ownership.most_ranges(),
        " ranges on its ranks; at most ", kMostListedRanges,
        " are looked at, so take fewer ranks or documents");
}

Moves Ownership::to_rank(int rank) const {
  return Moves::gather(ranges_of(rank), tokens_);
}

Moves Ownership::to_all_ranks() const {
  check_listable("Ownership::to_all_ranks", *this);
  std::vector<TokenRange> all;
  for (int rank = 0; rank < ranks_; ++rank) {
    for (TokenRange range : ranges_of(rank)) all.push_back(range);
  }
  return Moves::gather(all, tokens_);
}

std::string Ownership::to_string() const {
  return join("Ownership(", longspan::to_string(kind_), ", ", tokens_,
              " tokens, ", ranks_, ranks_ == 1 ? " rank)" : " ranks)");
}

bool operator==(const Ownership& a, const Ownership& b) {
  if (a.kind_ != b.kind_ || a.tokens_ != b.tokens_ || a.ranks_ != b.ranks_) {
    return false;
  }
  if (a.kind_ != OwnershipKind::ranges) return a.packing_ == b.packing_;
  return a.ranges_data_->held == b.ranges_data_->held &&
         a.ranges_data_->first_held == b.ranges_data_->first_held;
}

}  // namespace longspan
