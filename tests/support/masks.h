#pragma once

#include "longspan/core/mask.h"
#include "tests/support/values.h"

/// Masks as records, as in values.h.
namespace longspan::test {

// ---- Masks.

enum class MaskKind { causal, full, sliding, banded, compressed };

struct MaskCase {
  PackingCase packing;
  MaskKind kind = MaskKind::causal;
  int64_t before = 0;  // sliding, banded
  int64_t after = 0;   // banded
  int64_t ratio = 1;   // compressed
  std::vector<TokenRange> hidden = {};
  std::vector<TokenRange> groups = {};
  std::vector<int64_t> prefix = {};  // none, or one for each document
  GroupReach reach = GroupReach::whole_group;
  PadQueries pads = PadQueries::see_nothing;

  /// Ranges cut off at the end of the stream; groups that overlap a prefix,
  /// and what a compressed mask does not have, left out.
  MaskCase fitted() const {
    MaskCase fitted = *this;
    const TokenRange stream{0, packing.tokens()};
    for (TokenRange& range : fitted.hidden) range = intersect(range, stream);
    for (TokenRange& range : fitted.groups) range = intersect(range, stream);
    if (!prefix.empty()) {
      fitted.prefix.resize(packing.documents.size());
      int64_t begin = 0;
      for (std::size_t d = 0; d < packing.documents.size(); ++d) {
        int64_t& length = fitted.prefix[d];
        length = std::min(length, packing.documents[d].length);
        std::erase_if(fitted.groups, [&](TokenRange group) {
          return !intersect(group, {begin, begin + length}).empty();
        });
        begin += packing.documents[d].slot;
      }
    }
    const auto is_empty = [](TokenRange range) { return range.empty(); };
    std::erase_if(fitted.hidden, is_empty);
    std::erase_if(fitted.groups, is_empty);
    if (kind == MaskKind::compressed) {
      fitted.hidden = {};
      fitted.groups = {};
      fitted.prefix = {};
    }
    return fitted;
  }

  Mask mask() const {
    const Packing of = packing.packing();
    Mask mask = kind == MaskKind::causal    ? Mask::causal(of)
                : kind == MaskKind::full    ? Mask::full(of)
                : kind == MaskKind::sliding ? Mask::sliding(of, before + 1)
                : kind == MaskKind::banded  ? Mask::banded(of, {before, after})
                                            : Mask::compressed(of, ratio);
    if (!hidden.empty()) mask = mask.with_hidden(hidden);
    if (!groups.empty()) mask = mask.with_groups(groups);
    if (!prefix.empty()) mask = mask.with_prefix(prefix);
    return mask.with_group_reach(reach).with_pad_queries(pads);
  }

  std::vector<MaskCase> smaller() const {
    std::vector<MaskCase> cases;
    const auto with = [&](const auto& change) {
      cases.push_back(*this);
      change(cases.back());
      cases.back() = cases.back().fitted();
    };
    for (const PackingCase& less : packing.smaller()) {
      with([&](MaskCase& c) { c.packing = less; });
    }
    for (const auto& fewer : without_one(hidden)) {
      with([&](MaskCase& c) { c.hidden = fewer; });
    }
    for (const auto& fewer : without_one(groups)) {
      with([&](MaskCase& c) { c.groups = fewer; });
    }
    if (!prefix.empty()) {
      with([](MaskCase& c) { c.prefix = {}; });
    }
    if (reach != GroupReach::whole_group) {
      with([](MaskCase& c) { c.reach = GroupReach::whole_group; });
    }
    if (pads != PadQueries::see_nothing) {
      with([](MaskCase& c) { c.pads = PadQueries::see_nothing; });
    }
    if (before > 0) {
      with([](MaskCase& c) { --c.before; });
    }
    if (after > 0) {
      with([](MaskCase& c) { --c.after; });
    }
    if (ratio > 1) {
      with([](MaskCase& c) { --c.ratio; });
    }
    const auto shorter = [&](std::vector<TokenRange> MaskCase::* ranges) {
      for (std::size_t i = 0; i < (this->*ranges).size(); ++i) {
        if ((this->*ranges)[i].size() <= 1) continue;
        with([&](MaskCase& c) { --(c.*ranges)[i].end; });
        with([&](MaskCase& c) { ++(c.*ranges)[i].begin; });
      }
    };
    shorter(&MaskCase::hidden);
    shorter(&MaskCase::groups);
    return cases;
  }

  std::string to_string() const {
    constexpr std::array<const char*, 5> kNames{"causal", "full", "sliding",
                                                "banded", "compressed"};
    std::string text = kNames[static_cast<std::size_t>(kind)];
    if (kind == MaskKind::sliding) text += join(" ", before + 1);
    if (kind == MaskKind::banded) text += join(" ", before, "+", after);
    if (kind == MaskKind::compressed) text += join(" ", ratio, ":1");
    text += ", " + packing.to_string();
    if (!hidden.empty()) text += ", hidden " + listed(hidden);
    if (!groups.empty()) text += ", groups " + listed(groups);
    if (!prefix.empty()) text += ", prefix " + listed(prefix);
    if (reach == GroupReach::within_window) text += ", within the window";
    if (pads == PadQueries::see_document) text += ", pads see";
    return text;
  }
};

/// A mask over a packing; `kinds` says which may be drawn.
inline MaskCase draw_mask(Random& random, const PackingCase& packing,
                          const std::vector<MaskKind>& kinds) {
  MaskCase drawn{packing, random.pick(kinds)};
  const int64_t tokens = packing.tokens();
  drawn.before = random.between(0, random.one_in(2) ? 3 : 24);
  drawn.after = random.between(0, random.one_in(2) ? 3 : 24);
  drawn.ratio = random.between(1, random.one_in(4) ? 9 : 4);
  if (random.one_in(3)) {
    for (int64_t i = random.between(1, 3); i > 0; --i) {
      drawn.hidden.push_back(
          random.one_in(2) ? draw_range(random, tokens)
                           : draw_range(random, std::min(tokens, int64_t{4})));
    }
  }
  if (random.one_in(3)) {
    int64_t next = random.between(0, 8);
    while (next < tokens) {
      const int64_t end = next + random.between(1, 12);
      drawn.groups.push_back({next, end});
      next = end + (random.one_in(3) ? 0 : random.between(0, 20));
    }
    random.shuffle(drawn.groups);
  }
  if (random.one_in(4)) {
    for (const auto& document : packing.documents) {
      drawn.prefix.push_back(random.between(0, document.length));
    }
  }
  if (random.one_in(2)) drawn.reach = GroupReach::within_window;
  if (random.one_in(3)) drawn.pads = PadQueries::see_document;
  return drawn.fitted();
}

inline const std::vector<MaskKind>& token_masks() {
  static const std::vector<MaskKind> kinds{MaskKind::causal, MaskKind::full,
                                           MaskKind::sliding, MaskKind::banded};
  return kinds;
}

// ---- A mask and who owns its tokens.

struct SharedMaskCase {
  MaskCase mask;
  OwnershipCase owners;  // of the tokens of mask.packing

  /// One packing for both, which the ownership can cut.
  SharedMaskCase fitted() const {
    SharedMaskCase fitted = *this;
    fitted.mask.packing = mask.packing.fitted_to(owners.kind, owners.ranks);
    fitted.mask = fitted.mask.fitted();
    fitted.owners.packing = fitted.mask.packing;
    return fitted;
  }

  std::vector<SharedMaskCase> smaller() const {
    std::vector<SharedMaskCase> cases;
    for (const OwnershipCase& less : owners.smaller()) {
      SharedMaskCase c{mask, less};
      c.mask.packing = less.packing;
      cases.push_back(c.fitted());
    }
    for (const MaskCase& less : mask.smaller()) {
      cases.push_back(SharedMaskCase{less, owners}.fitted());
    }
    return cases;
  }

  std::string to_string() const {
    return mask.to_string() + "; " + owners.to_string();
  }
};

inline SharedMaskCase draw_shared_mask(Random& random, int64_t longest = 32) {
  const PackingCase packing = draw_packing(random, longest, 4);
  const OwnershipCase owners = draw_ownership(random, packing);
  return SharedMaskCase{draw_mask(random, owners.packing, token_masks()),
                        owners}
      .fitted();
}

}  // namespace longspan::test
