#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/ownership.h"
#include "longspan/core/packing.h"
#include "tests/support/property.h"

/// Packings and ownerships as records: drawn at random, shrunk, printed,
/// and turned into the values under test.
namespace longspan::test {

// ---- Lists and ranges.

/// `values[i]` with any integer, checked.
template <class T>
decltype(auto) at(T&& values, std::integral auto i) {
  if (i < 0 || static_cast<std::size_t>(i) >= std::size(values)) {
    throw std::out_of_range(join("at: ", i, " of ", std::size(values)));
  }
  return values[static_cast<std::size_t>(i)];
}

/// The tokens of ranges, one by one.
inline std::vector<int64_t> tokens_of(const std::vector<TokenRange>& ranges) {
  std::vector<int64_t> tokens;
  for (TokenRange range : ranges) {
    for (int64_t t = range.begin; t < range.end; ++t) tokens.push_back(t);
  }
  return tokens;
}

/// Neighbours in a list that follow one another, as ranges in list order.
inline std::vector<TokenRange> runs_in(const std::vector<int64_t>& tokens) {
  std::vector<TokenRange> runs;
  for (int64_t token : tokens) {
    if (!runs.empty() && runs.back().end == token) {
      ++runs.back().end;
    } else {
      runs.push_back({token, token + 1});
    }
  }
  return runs;
}

/// Every range inside [0, tokens), empty ones too.
inline std::vector<TokenRange> all_ranges(int64_t tokens) {
  std::vector<TokenRange> ranges;
  for (int64_t begin = 0; begin <= tokens; ++begin) {
    for (int64_t end = begin; end <= tokens; ++end) {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

inline TokenRange draw_range(Random& random, int64_t tokens) {
  const int64_t a = random.between(0, tokens);
  const int64_t b = random.between(0, tokens);
  return {std::min(a, b), std::max(a, b)};
}

template <class T>
std::string listed(const std::vector<T>& values) {
  std::string text = "{";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += join(i == 0 ? "" : ", ", values[i]);
  }
  return text + "}";
}

/// The list without each of its elements in turn.
template <class T>
std::vector<std::vector<T>> without_one(const std::vector<T>& values) {
  std::vector<std::vector<T>> shorter;
  for (auto i = values.begin(); i != values.end(); ++i) {
    shorter.emplace_back(values.begin(), i);
    shorter.back().insert(shorter.back().end(), i + 1, values.end());
  }
  return shorter;
}

// ---- Refusals.

/// A call that must be refused, and the whole message.
struct Refusal {
  std::string name;
  std::function<void()> call;
  std::string message;
};

inline std::ostream& operator<<(std::ostream& out, const Refusal& refusal) {
  return out << refusal.name;
}

inline std::string refusal_name(const ::testing::TestParamInfo<Refusal>& info) {
  return info.param.name;
}

/// The message of a caller's mistake; "accepted" where there is none.
inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

// ---- Packings.

struct PackingCase {
  struct Document {
    int64_t length = 0;
    int64_t slot = 0;
  };
  std::vector<Document> documents;
  int64_t tail = 0;

  int64_t tokens() const {
    int64_t total = tail;
    for (const Document& document : documents) total += document.slot;
    return total;
  }

  Packing packing() const {
    std::vector<int64_t> lengths, slots;
    for (const Document& document : documents) {
      lengths.push_back(document.length);
      slots.push_back(document.slot);
    }
    return Packing::of(lengths, slots, tokens());
  }

  /// Slots or tail rounded up to what an ownership kind can cut.
  PackingCase fitted_to(OwnershipKind kind, int ranks) const {
    PackingCase fitted = *this;
    const auto up = [&](int64_t tokens) {
      const int64_t multiple = tokens_multiple(kind, ranks);
      return (tokens + multiple - 1) / multiple * multiple;
    };
    if (kind == OwnershipKind::per_document_head_tail) {
      for (Document& document : fitted.documents) {
        document.slot = up(document.slot);
      }
      fitted.tail = up(tail);
    } else {
      fitted.tail += up(tokens()) - tokens();
    }
    return fitted;
  }

  std::vector<PackingCase> smaller() const {
    std::vector<PackingCase> cases;
    for (const auto& fewer : without_one(documents)) {
      cases.push_back({fewer, tail});
    }
    if (tail > 0) {
      cases.push_back({documents, 0});
      cases.push_back({documents, tail / 2});
      cases.push_back({documents, tail - 1});
    }
    for (std::size_t d = 0; d < documents.size(); ++d) {
      const auto with = [&](Document document) {
        if (document.length < 0 || document.slot < document.length) return;
        PackingCase changed = *this;
        changed.documents[d] = document;
        cases.push_back(changed);
      };
      const auto [length, slot] = documents[d];
      if (length > 1) with({length / 2, length / 2});
      if (slot > length) with({length, length});
      if (slot > length) with({length, slot - 1});
      if (length > 0) with({length - 1, slot - 1});
      if (length > 0) with({length - 1, slot});
    }
    return cases;
  }

  std::string to_string() const {
    std::string text = "documents {";
    for (const Document& document : documents) {
      text += join(" ", document.length, "/", document.slot);
    }
    return text + join(" } tail ", tail);
  }
};

/// Up to `most` documents of up to `longest` tokens; short, empty and padded
/// ones are common.
inline PackingCase draw_packing(Random& random, int64_t longest = 64,
                                int64_t most = 5) {
  PackingCase drawn;
  const int64_t documents = random.between(random.one_in(8) ? 0 : 1, most);
  for (int64_t d = 0; d < documents; ++d) {
    const int64_t length =
        random.one_in(5)
            ? 0
            : random.between(0, random.one_in(2) ? longest / 8 : longest);
    const int64_t pads = random.one_in(2) ? 0 : random.between(1, 6);
    drawn.documents.push_back({length, length + pads});
  }
  if (random.one_in(3)) drawn.tail = random.between(1, 6);
  return drawn;
}

/// Every packing of up to `most` documents in slots of up to `longest` tokens.
inline std::vector<PackingCase> all_packings(
    int most, int64_t longest, const std::vector<int64_t>& tails) {
  std::vector<PackingCase> cases;
  std::vector<PackingCase> of_count{{}};
  for (int count = 0; count <= most; ++count) {
    std::vector<PackingCase> longer;
    for (const PackingCase& packing : of_count) {
      for (int64_t tail : tails) cases.push_back({packing.documents, tail});
      for (int64_t slot = 0; slot <= longest; ++slot) {
        for (int64_t length = 0; length <= slot; ++length) {
          longer.push_back(packing);
          longer.back().documents.push_back({length, slot});
        }
      }
    }
    of_count = std::move(longer);
  }
  return cases;
}

// ---- Ownerships.

inline const std::vector<OwnershipKind>& all_kinds() {
  static const std::vector<OwnershipKind> kinds{
      OwnershipKind::contiguous, OwnershipKind::head_tail,
      OwnershipKind::per_document_head_tail, OwnershipKind::ranges};
  return kinds;
}

struct OwnershipCase {
  /// For `ranges`: the stream is cut into pieces of these sizes (the last one
  /// takes the rest), and a rank holds its pieces by ascending `turn`.
  struct Piece {
    int64_t size = 0;
    int rank = 0;
    int64_t turn = 0;
  };
  OwnershipKind kind = OwnershipKind::contiguous;
  int ranks = 1;
  PackingCase packing;
  std::vector<Piece> pieces = {};

  OwnershipCase fitted() const {
    OwnershipCase fitted = *this;
    fitted.packing = packing.fitted_to(kind, ranks);
    return fitted;
  }

  std::vector<std::vector<TokenRange>> ranges() const {
    struct Placed {
      Piece piece;
      TokenRange tokens;
    };
    std::vector<Placed> placed;
    int64_t begin = 0;
    for (const Piece& piece : pieces) {
      const int64_t end = std::min(begin + piece.size, packing.tokens());
      placed.push_back({piece, {begin, end}});
      begin = end;
    }
    if (placed.empty()) placed.push_back({{}, {0, 0}});
    placed.back().tokens.end = packing.tokens();
    std::ranges::stable_sort(placed, {},
                             [](const Placed& p) { return p.piece.turn; });
    std::vector<std::vector<TokenRange>> of_ranks(
        static_cast<std::size_t>(ranks));
    for (const Placed& p : placed) {
      at(of_ranks, p.piece.rank % ranks).push_back(p.tokens);
    }
    return of_ranks;
  }

  Ownership ownership() const {
    return kind == OwnershipKind::ranges
               ? Ownership::of_ranges(ranges())
               : Ownership::of(kind, packing.packing(), ranks);
  }

  /// What each rank holds, in local order, token by token.
  std::vector<std::vector<int64_t>> shares() const {
    std::vector<std::vector<int64_t>> shares(static_cast<std::size_t>(ranks));
    const auto deal = [&](TokenRange tokens, int chunks) {
      const int64_t size = tokens.size() / chunks;
      for (int rank = 0; rank < ranks; ++rank) {
        for (int chunk : {rank, 2 * ranks - 1 - rank}) {
          if (chunk >= chunks) continue;
          for (int64_t i = 0; i < size; ++i) {
            at(shares, rank).push_back(tokens.begin + chunk * size + i);
          }
        }
      }
    };
    if (kind == OwnershipKind::contiguous) {
      deal({0, packing.tokens()}, ranks);
    } else if (kind == OwnershipKind::head_tail) {
      deal({0, packing.tokens()}, 2 * ranks);
    } else if (kind == OwnershipKind::per_document_head_tail) {
      int64_t begin = 0;
      for (const auto& document : packing.documents) {
        deal({begin, begin + document.slot}, 2 * ranks);
        begin += document.slot;
      }
      deal({begin, begin + packing.tail}, 2 * ranks);
    } else {
      const auto held = ranges();
      for (int rank = 0; rank < ranks; ++rank) {
        at(shares, rank) = tokens_of(at(held, rank));
      }
    }
    return shares;
  }

  std::vector<OwnershipCase> smaller() const {
    std::vector<OwnershipCase> cases;
    const auto with = [&](const auto& change) {
      cases.push_back(*this);
      change(cases.back());
      cases.back() = cases.back().fitted();
    };
    if (ranks > 1) {
      with([&](OwnershipCase& c) { c.ranks = ranks - 1; });
    }
    for (const PackingCase& less : packing.smaller()) {
      with([&](OwnershipCase& c) { c.packing = less; });
    }
    for (const auto& fewer : without_one(pieces)) {
      with([&](OwnershipCase& c) { c.pieces = fewer; });
    }
    return cases;
  }

  std::string to_string() const {
    std::string text = join(longspan::to_string(kind), " over ", ranks,
                            " ranks, ", packing.to_string());
    if (kind != OwnershipKind::ranges) return text;
    for (const auto& held : ranges()) text += " " + listed(held);
    return text;
  }
};

inline OwnershipCase draw_ownership(Random& random,
                                    const PackingCase& packing) {
  OwnershipCase drawn{random.pick(all_kinds()),
                      static_cast<int>(random.between(1, 9)), packing};
  if (drawn.kind == OwnershipKind::ranges) {
    const int64_t most = random.one_in(2) ? 4 : 16;
    for (int64_t left = packing.tokens(); left > 0;) {
      const int64_t size = random.between(0, most);
      const auto rank = static_cast<int>(random.between(0, drawn.ranks - 1));
      drawn.pieces.push_back({size, rank, random.between(0, 99)});
      left -= size;
    }
  }
  return drawn.fitted();
}

}  // namespace longspan::test
