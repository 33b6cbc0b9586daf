#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "json.h"
#include "longspan/core/check.h"
#include "longspan/draw/draw.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "outcome.h"
#include "values.h"

namespace longspan::cli {

namespace {

/// The arguments as they came; an option that did not come is nothing.
struct DrawArguments {
  using Text = std::optional<std::string>;
  Text tokens, documents, ranks, layout, compare, sizes;
  Text mask, window, ratio, prefix;
  Text show, format, output;
  bool pad = false;
  bool ascii = false;
  bool color = false;
};

enum class Format { text, svg, json };

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw Refusal(join(parts...));
}

/// Nothing stands for "uneven", which takes its shape from --sizes.
std::optional<OwnershipKind> layout_named(const char* flag,
                                          const std::string& name) {
  if (name == "uneven") return std::nullopt;
  const auto kind = ownership_kind(name);
  require(
      kind && *kind != OwnershipKind::ranges, flag, " is '", name,
      "'; expected contiguous, head-tail, per-document-head-tail or uneven");
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

Layouts layouts_of(const DrawArguments& arguments) {
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

Packing packing_of(const DrawArguments& arguments, const Layouts& layouts) {
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

/// The same documents in a stream with a longer tail.
Packing lengthened(const Packing& packing, int64_t tokens) {
  std::vector<int64_t> slots;
  for (int64_t d = 0; d < packing.documents(); ++d) {
    slots.push_back(packing.padded_length(d));
  }
  const auto lengths = packing.lengths();
  return Packing::of({lengths.begin(), lengths.end()}, std::move(slots),
                     tokens);
}

Packing padded_for(const Packing& packing,
                   const std::optional<OwnershipKind>& layout,
                   const Layouts& layouts) {
  if (!layout) {
    return lengthened(packing,
                      std::max(packing.tokens(), sum_of(layouts.sizes)));
  }
  const int64_t multiple = tokens_multiple(*layout, layouts.ranks);
  return *layout == OwnershipKind::per_document_head_tail
             ? packing.with_slots_multiple_of(multiple)
             : packing.with_tokens_multiple_of(multiple);
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

Mask mask_of(const DrawArguments& arguments, const Packing& packing) {
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
  if (!arguments.prefix) return mask;
  return mask.with_prefix(
      number_list("--prefix", *arguments.prefix, 0, kMostDrawnTokens));
}

Format format_of(const DrawArguments& arguments) {
  constexpr const char* kChoices = "svg, text or json";
  if (arguments.format) {
    const std::string& name = *arguments.format;
    require(name == "svg" || name == "text" || name == "json", "--format is '",
            name, "'; expected ", kChoices);
    return name == "svg"    ? Format::svg
           : name == "json" ? Format::json
                            : Format::text;
  }
  if (!arguments.output || *arguments.output == "-") return Format::text;
  const std::string& path = *arguments.output;
  if (path.ends_with(".svg")) return Format::svg;
  if (path.ends_with(".json")) return Format::json;
  require(path.ends_with(".txt"), "cannot tell a format from '", path,
          "'; name it .svg, .txt or .json, or say --format");
  return Format::text;
}

Picture picture_of(const DrawArguments& arguments, const Mask& mask,
                   const Ownership& ownership, const DrawOptions& options) {
  const std::string show = arguments.show.value_or("all");
  if (show == "ownership") {
    return draw_ownership(ownership, mask.packing(), options);
  }
  if (show == "mask") return draw_mask(mask, ownership, options);
  if (show == "steps") return draw_steps(mask, ownership, options);
  if (show == "work") return draw_work(mask, ownership, options);
  require(show == "all", "--show is '", show,
          "'; expected all, ownership, mask, steps or work");
  return draw(mask, ownership, options);
}

void write(const std::optional<std::string>& path, const std::string& text) {
  if (!path || *path == "-") {
    std::cout << text << std::flush;
    if (!std::cout) throw Failure("cannot write to standard output");
    return;
  }
  const auto cannot = [&] {
    return join("cannot write '", *path, "'",
                errno == 0 ? "" : join(": ", std::strerror(errno)));
  };
  errno = 0;
  std::ofstream file(*path, std::ios::binary);
  if (!file) throw Refusal(cannot());  // a wrong path
  file << text;
  file.close();
  if (!file) throw Failure(cannot());  // a full disk
}

void run_draw(const DrawArguments& arguments) {
  const Format format = format_of(arguments);
  require(format == Format::text || !(arguments.ascii || arguments.color),
          arguments.ascii ? "--ascii" : "--color",
          " goes with text; leave it out or say --format text");
  require(!arguments.compare || !arguments.show,
          "--compare shows everything; leave --show out");
  const Layouts layouts = layouts_of(arguments);
  Packing packing = packing_of(arguments, layouts);
  if (arguments.pad) {
    packing = padded_for(packing, layouts.first, layouts);
    if (layouts.second) packing = padded_for(packing, *layouts.second, layouts);
    check_drawable(packing, layouts.ranks);
  }
  const Ownership ownership =
      ownership_of(packing, layouts.first, layouts, arguments.pad);
  const Mask mask = mask_of(arguments, packing);

  DrawOptions options;
  // In text two letters make a square cell, unless documents need the detail.
  if (format == Format::text &&
      (packing.documents() < 2 || packing.tokens() > options.strip_cells)) {
    options.grid_cells = 32;
  }
  const Picture picture =
      layouts.second ? draw_comparison(mask, ownership,
                                       ownership_of(packing, *layouts.second,
                                                    layouts, arguments.pad),
                                       options)
                     : picture_of(arguments, mask, ownership, options);
  TextOptions text;
  text.glyphs = arguments.ascii ? Glyphs::ascii : Glyphs::unicode;
  text.ink = arguments.color ? Ink::ansi : Ink::plain;
  write(arguments.output, format == Format::svg    ? to_svg(picture)
                          : format == Format::json ? to_json(picture)
                                                   : to_text(picture, text));
}

}  // namespace

Command add_draw(CLI::App& program) {
  CLI::App& draw = *program.add_subcommand(
      "draw", "Draw who owns which token, who computes what, and the work");
  auto arguments = std::make_shared<DrawArguments>();
  const auto text = [&](const char* name, DrawArguments::Text& value,
                        const char* help, const char* kind) {
    draw.add_option_function<std::string>(
            name, [&value](const std::string& came) { value = came; }, help)
        ->type_name(kind)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text("--tokens", arguments->tokens, "A stream of one document", "N");
  text("--documents", arguments->documents,
       "Documents laid end to end: length or length/slot, as in 5,3/8,0/4",
       "LIST");
  text("--ranks", arguments->ranks, "Number of ranks", "N");
  text("--layout", arguments->layout,
       "contiguous, head-tail (default), per-document-head-tail, uneven",
       "NAME");
  text("--sizes", arguments->sizes,
       "Tokens of each rank for an uneven layout, as in 10,0,6", "LIST");
  text("--compare", arguments->compare, "A second layout, drawn beside",
       "NAME");
  draw.add_flag("--pad", arguments->pad,
                "Lengthen the stream (or its slots) until it splits");
  text("--mask", arguments->mask, "causal (default), full, sliding, compressed",
       "NAME");
  text("--window", arguments->window, "Keys a sliding query sees", "N");
  text("--ratio", arguments->ratio, "Tokens behind a compressed key", "N");
  text("--prefix", arguments->prefix,
       "Leading tokens of each document that see each other both ways", "LIST");
  text("--show", arguments->show, "all (default), ownership, mask, steps, work",
       "NAME");
  text("--format", arguments->format,
       "svg, text or json; else by the file's name, else text", "NAME");
  text("-o,--output", arguments->output, "File to write; - is the terminal",
       "FILE");
  draw.add_flag("--ascii", arguments->ascii, "Text in plain ASCII");
  draw.add_flag("--color", arguments->color, "Text with ANSI colours");
  return [arguments, &draw] {
    for (const CLI::Option* option : draw.get_options()) {
      require(option->count() <= 1, option->get_name(), " came ",
              option->count(), " times; expected it once");
    }
    run_draw(*arguments);
  };
}

}  // namespace longspan::cli
