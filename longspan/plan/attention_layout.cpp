#include "longspan/plan/attention_layout.h"

#include <limits>
#include <stdexcept>
#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/tile.h"

namespace longspan {

namespace {

// "span" and a version: a tensor of anything else is refused by name.
constexpr int64_t kMark = 0x7370616e;
constexpr int64_t kVersion = 2;

class Writer {
 public:
  void number(int64_t value) { code_.push_back(value); }
  void ranges(const std::vector<TokenRange>& ranges) {
    number(std::ssize(ranges));
    for (TokenRange range : ranges) {
      number(range.begin);
      number(range.end);
    }
  }
  void packing(const Packing& packing) {
    number(packing.documents());
    number(packing.tokens());
    for (int64_t d = 0; d < packing.documents(); ++d) {
      number(packing.length(d));
      number(packing.padded_length(d));
    }
  }
  std::vector<int64_t> take() { return std::move(code_); }

 private:
  std::vector<int64_t> code_;
};

class Reader {
 public:
  explicit Reader(std::span<const int64_t> code) : code_(code) {}

  int64_t number() {
    check(at_ < code_.size(), "AttentionLayout: the code ends after ", at_,
          " numbers; pass the tensor of an AttentionLayout, whole");
    return code_[at_++];
  }
  /// A count of things that take `each` numbers.
  int64_t count(int64_t each) {
    const int64_t value = number();
    const auto left = static_cast<int64_t>(code_.size() - at_);
    check(value >= 0 && value <= left / each, "AttentionLayout: the code has ",
          left, " numbers left but announces ", value, " entries of ", each);
    return value;
  }
  std::vector<TokenRange> ranges() {
    std::vector<TokenRange> ranges(static_cast<std::size_t>(count(2)));
    for (TokenRange& range : ranges) {
      range.begin = number();
      range.end = number();
    }
    return ranges;
  }
  Packing packing() {
    const int64_t documents = number();
    const int64_t tokens = number();
    const auto left = static_cast<int64_t>(code_.size() - at_);
    check(documents >= 0 && documents <= left / 2,
          "AttentionLayout: ", documents, " documents in a code with ", left,
          " numbers left");
    std::vector<int64_t> lengths, slots;
    for (int64_t d = 0; d < documents; ++d) {
      lengths.push_back(number());
      slots.push_back(number());
    }
    return Packing::of(std::move(lengths), std::move(slots), tokens);
  }
  bool done() const { return at_ == code_.size(); }

 private:
  std::span<const int64_t> code_;
  std::size_t at_ = 0;
};

void write(Writer& out, const Ownership& ownership) {
  out.number(static_cast<int64_t>(ownership.kind()));
  out.number(ownership.tokens());
  out.number(ownership.ranks());
  switch (ownership.kind()) {
    case OwnershipKind::contiguous:
    case OwnershipKind::head_tail:
      break;
    case OwnershipKind::per_document_head_tail:
      out.packing(ownership.packing());
      break;
    case OwnershipKind::ranges:
      for (int rank = 0; rank < ownership.ranks(); ++rank) {
        out.ranges(ownership.ranges_of(rank));
      }
      break;
  }
}

Ownership read_ownership(Reader& in, int64_t most_ranks) {
  const auto kind = static_cast<OwnershipKind>(in.number());
  const int64_t tokens = in.number();
  const int64_t ranks = in.number();
  check(ranks >= 1 && ranks <= std::numeric_limits<int>::max(),
        "AttentionLayout: ", ranks, " ranks");
  const int count = static_cast<int>(ranks);
  switch (kind) {
    case OwnershipKind::contiguous:
      return Ownership::contiguous(tokens, count);
    case OwnershipKind::head_tail:
      return Ownership::head_tail(tokens, count);
    case OwnershipKind::per_document_head_tail:
      return Ownership::per_document_head_tail(in.packing(), count);
    case OwnershipKind::ranges: {
      check(ranks <= most_ranks, "AttentionLayout: ", ranks,
            " ranks in a code of ", most_ranks, " numbers");
      std::vector<std::vector<TokenRange>> held;
      for (int64_t r = 0; r < ranks; ++r) held.push_back(in.ranges());
      return Ownership::of_ranges(std::move(held));
    }
  }
  throw std::invalid_argument(
      join("AttentionLayout: ownership kind ", static_cast<int64_t>(kind)));
}

void write(Writer& out, const Mask& mask) {
  out.packing(mask.packing());
  out.number(mask.band().before);
  out.number(mask.band().after);
  out.number(mask.pad_queries() == PadQueries::see_document);
  out.number(mask.group_reach() == GroupReach::within_window);
  out.ranges(mask.hidden());
  out.ranges(mask.groups());
}

Mask read_mask(Reader& in) {
  const Packing packing = in.packing();
  Band band;
  band.before = in.number();
  band.after = in.number();
  const int64_t pads_see = in.number();
  check(pads_see == 0 || pads_see == 1, "AttentionLayout: pad queries ",
        pads_see, "; expected 0 or 1");
  const int64_t within = in.number();
  check(within == 0 || within == 1,
        "AttentionLayout: groups within the window ", within,
        "; expected 0 or 1");
  Mask mask = Mask::banded(packing, band)
                  .with_pad_queries(pads_see != 0 ? PadQueries::see_document
                                                  : PadQueries::see_nothing)
                  .with_group_reach(within != 0 ? GroupReach::within_window
                                                : GroupReach::whole_group);
  const auto hidden = in.ranges();
  if (!hidden.empty()) mask = mask.with_hidden(hidden);
  auto groups = in.ranges();
  if (!groups.empty()) mask = mask.with_groups(std::move(groups));
  return mask;
}

}  // namespace

AttentionLayout AttentionLayout::of(Ownership ownership,
                                    std::vector<Mask> masks) {
  check(!masks.empty(), "AttentionLayout: no mask; give one, or one a row");
  for (const Mask& mask : masks) {
    check(mask.ratio() == 0, "AttentionLayout: the keys of ", mask.to_string(),
          " are not tokens; attend to them as a second block of keys");
    check(mask.queries() == ownership.tokens(),
          "AttentionLayout: ", mask.to_string(), " over ",
          ownership.to_string(),
          "; mask and ownership must have the same tokens");
  }
  return {std::move(ownership), std::move(masks)};
}

std::vector<TokenRange> AttentionLayout::needed_by(
    const std::vector<TokenRange>& queries) const {
  std::vector<TokenRange> all;
  for (const Mask& mask : masks) {
    const auto needed = needed_keys(mask, queries);
    all.insert(all.end(), needed.begin(), needed.end());
  }
  return masks.size() == 1 ? all : normalized(std::move(all));
}

std::vector<int64_t> AttentionLayout::encode() const {
  Writer out;
  out.number(kMark);
  out.number(kVersion);
  write(out, ownership);
  out.number(std::ssize(masks));
  for (const Mask& mask : masks) write(out, mask);
  return out.take();
}

AttentionLayout AttentionLayout::decode(std::span<const int64_t> code) {
  Reader in(code);
  check(code.size() >= 2 && in.number() == kMark && in.number() == kVersion,
        "AttentionLayout: this is no layout of attention (", code.size(),
        " numbers); make one with AttentionLayout");
  Ownership ownership = read_ownership(in, std::ssize(code));
  std::vector<Mask> masks;
  const int64_t count = in.count(5);
  for (int64_t i = 0; i < count; ++i) masks.push_back(read_mask(in));
  check(in.done(), "AttentionLayout: numbers are left over in the code");
  return of(std::move(ownership), std::move(masks));
}

}  // namespace longspan
