#include "stream.h"

#include <CLI/CLI.hpp>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"
#include "longspan/core/padding.h"
#include "longspan/draw/draw.h"
#include "options.h"
#include "outcome.h"
#include "values.h"

namespace longspan::cli {

namespace {

/// Nothing stands for "uneven", which takes its shape from --sizes.
std::optional<OwnershipKind> layout_named(const char* flag,
                                          const std::string& name) {
  if (name == "uneven") return std::nullopt;
  const auto kind = ownership_kind(name);
  constexpr std::array<std::string_view, 4> names{
      "contiguous", "head-tail", "per-document-head-tail", "uneven"};
  require(kind && *kind != OwnershipKind::ranges, flag, " is '", name,
          "'; expected contiguous, head-tail, per-document-head-tail or uneven",
          did_you_mean(name, names));
  return kind;
}

/// Which ranks own the stream, before it is padded to fit.
struct Layouts {
  std::optional<OwnershipKind> first;
  std::optional<std::optional<OwnershipKind>> second;
  std::vector<int64_t> sizes;
  int ranks = 1;

  bool uneven() const { return !first || (second && !*second); }
};

Layouts layouts_of(const StreamArguments& arguments) {
  Layouts layouts;
  layouts.first =
      layout_named("--layout", arguments.layout.value_or("head-tail"));
  if (arguments.compare) {
    layouts.second = layout_named("--compare", *arguments.compare);
  }
  require(!layouts.uneven() || arguments.sizes,
          "an uneven layout needs --sizes, such as --sizes 10,0,6");
  require(layouts.uneven() || !arguments.sizes,
          "--sizes goes with --layout uneven");
  require(layouts.uneven() || arguments.ranks,
          "--ranks is missing; expected the number of ranks, such as 4");
  if (layouts.uneven()) {
    layouts.sizes =
        number_list("--sizes", *arguments.sizes, 0, kMostDrawnTokens);
    require(std::ssize(layouts.sizes) <= kMostDrawnRanks, "--sizes has ",
            layouts.sizes.size(), " entries; expected at most ",
            kMostDrawnRanks);
    layouts.ranks = static_cast<int>(layouts.sizes.size());
  }
  if (arguments.ranks) {
    const auto ranks = static_cast<int>(
        whole_number("--ranks", *arguments.ranks, 1, kMostDrawnRanks));
    require(!layouts.uneven() || ranks == layouts.ranks, "--ranks is ", ranks,
            " but --sizes has ", layouts.ranks, " entries; expected as many");
    layouts.ranks = ranks;
  }
  return layouts;
}

int64_t sum_of(const std::vector<int64_t>& sizes) {
  int64_t sum = 0;
  for (int64_t size : sizes) sum += size;  // 2^20 of at most 2^31 each
  return sum;
}

Packing packing_of(const StreamArguments& arguments, const Layouts& layouts) {
  require(!arguments.tokens || !arguments.documents,
          "--tokens and --documents both came; expected one of them");
  require(arguments.tokens || arguments.documents || layouts.uneven(),
          "no stream came; expected --tokens 64 or --documents 5,3/8,0/4");
  Packing packing;
  if (arguments.documents) {
    packing =
        document_list("--documents", *arguments.documents, kMostDrawnTokens);
  } else {
    packing = Packing::single(
        arguments.tokens
            ? whole_number("--tokens", *arguments.tokens, 0, kMostDrawnTokens)
            : sum_of(layouts.sizes));
  }
  check_drawable(packing, layouts.ranks);
  return packing;
}

/// A free cut asks for as many tokens as its sizes add up to, at least.
Packing padded_for(const Packing& packing,
                   const std::optional<OwnershipKind>& layout,
                   const Layouts& layouts) {
  if (layout) return padded(packing, padding_for(*layout, layouts.ranks));
  return lengthened(packing, sum_of(layouts.sizes));
}

Ownership ownership_of(const Packing& packing,
                       const std::optional<OwnershipKind>& layout,
                       const Layouts& layouts, bool pad) {
  if (!layout) {
    const int64_t sum = sum_of(layouts.sizes);
    require(sum == packing.tokens(), "--sizes add up to ", sum,
            " but the stream has ", packing.tokens(), " tokens; change one",
            pad || sum < packing.tokens() ? "" : ", or --pad the stream");
    return Ownership::of_sizes(layouts.sizes);
  }
  try {
    return Ownership::of(*layout, packing, layouts.ranks);
  } catch (const std::invalid_argument& uneven) {
    throw Refusal(join(uneven.what(), pad ? "" : " (--pad does it)"));
  }
}

GroupReach group_reach_named(const std::string& name) {
  require(name == "whole-group" || name == "within-window",
          "--group-reach is '", name,
          "'; expected whole-group or within-window");
  return name == "whole-group" ? GroupReach::whole_group
                               : GroupReach::within_window;
}

Mask mask_of(const StreamArguments& arguments, const Packing& packing) {
  const std::string name = arguments.mask.value_or("causal");
  const auto only_with = [&](const std::optional<std::string>& text,
                             const char* flag, const char* mask) {
    require(!text || name == mask, flag, " goes with --mask ", mask, ", not ",
            name);
    require(text || name != mask, "--mask ", mask, " needs ", flag,
            ", such as ", flag, " 4");
  };
  require(name == "causal" || name == "full" || name == "sliding" ||
              name == "compressed",
          "--mask is '", name,
          "'; expected causal, full, sliding or compressed");
  only_with(arguments.window, "--window", "sliding");
  only_with(arguments.ratio, "--ratio", "compressed");
  const auto number = [](const char* flag, const std::string& text) {
    return whole_number(flag, text, 1, kMostDrawnTokens);
  };
  Mask mask =
      name == "causal" ? Mask::causal(packing)
      : name == "full" ? Mask::full(packing)
      : name == "sliding"
          ? Mask::sliding(packing, number("--window", *arguments.window))
          : Mask::compressed(packing, number("--ratio", *arguments.ratio));
  if (arguments.prefix) {
    mask = mask.with_prefix(
        number_list("--prefix", *arguments.prefix, 0, kMostDrawnTokens));
  }
  if (arguments.groups) {
    mask = mask.with_groups(
        range_list("--groups", *arguments.groups, kMostDrawnTokens));
  }
  if (arguments.group_reach) {
    mask = mask.with_group_reach(group_reach_named(*arguments.group_reach));
  }
  return mask;
}

}  // namespace

void add_stream(CLI::App& command, StreamArguments& arguments) {
  add_text(command, "--tokens", arguments.tokens, "A stream of one document",
           "N");
  add_text(command, "--documents", arguments.documents,
           "Packed documents, end to end: length or length/slot, as in "
           "5,3/8,0/4",
           "LIST");
  add_text(command, "--ranks", arguments.ranks, "Number of ranks", "N");
  add_text(command, "--layout", arguments.layout,
           "contiguous, head-tail (zigzag; default), per-document-head-tail "
           "(zigzag varlen), uneven",
           "NAME");
  add_text(command, "--sizes", arguments.sizes,
           "Tokens of each rank for an uneven layout, as in 10,0,6", "LIST");
  command.add_flag("--pad", arguments.pad,
                   "Lengthen the stream (or its slots) until it splits");
  add_text(command, "--mask", arguments.mask,
           "causal (default), full, sliding (SWA), compressed", "NAME");
  add_text(command, "--window", arguments.window, "Keys a sliding query sees",
           "N");
  add_text(command, "--ratio", arguments.ratio,
           "Tokens behind a compressed key", "N");
  add_text(command, "--prefix", arguments.prefix,
           "Leading tokens of each document that see each other both ways "
           "(prefix LM)",
           "LIST");
  add_text(command, "--groups", arguments.groups,
           "Tokens that see each other both ways (an image): begin-end, as in "
           "3-9,12-20",
           "LIST");
  add_text(command, "--group-reach", arguments.group_reach,
           "whole-group (default), or within-window: no further back than the "
           "window goes",
           "NAME");
}

Stream stream_of(const StreamArguments& arguments) {
  const Layouts layouts = layouts_of(arguments);
  Packing packing = packing_of(arguments, layouts);
  if (arguments.pad) {
    packing = padded_for(packing, layouts.first, layouts);
    if (layouts.second) packing = padded_for(packing, *layouts.second, layouts);
    check_drawable(packing, layouts.ranks);
  }
  Ownership ownership =
      ownership_of(packing, layouts.first, layouts, arguments.pad);
  Stream stream{mask_of(arguments, packing), std::move(ownership), {}};
  if (layouts.second) {
    stream.second =
        ownership_of(packing, *layouts.second, layouts, arguments.pad);
  }
  return stream;
}

}  // namespace longspan::cli
