#include <CLI/CLI.hpp>

#include <memory>
#include <optional>
#include <string>

#include "commands.h"
#include "longspan/draw/draw.h"
#include "longspan/plan/attention_layout.h"
#include "options.h"
#include "outcome.h"
#include "output.h"
#include "stream.h"

namespace longspan::cli {

namespace {

struct DrawArguments {
  StreamArguments stream;
  std::optional<std::string> show;
  OutputArguments output;
};

Picture picture_of(const DrawArguments& arguments, const Mask& mask,
                   const Ownership& ownership, const DrawOptions& options) {
  const std::string show = arguments.show.value_or("all");
  if (show == "ownership") {
    return draw_ownership(ownership, mask.packing(), options);
  }
  if (show == "mask") return draw_mask(mask, ownership, options);
  if (show == "steps") return draw_steps(mask, ownership, options);
  if (show == "work") return draw_work(mask, ownership, options);
  if (show == "states") {
    require(mask.ratio() == 0,
            "--show states goes with a mask of tokens, and this one is "
            "compressed");
    return draw_states(AttentionLayout::of(ownership, {mask}), {}, options);
  }
  require(show == "all", "--show is '", show,
          "'; expected all, ownership, mask, steps, work or states");
  return draw(mask, ownership, options);
}

void run_draw(const DrawArguments& arguments) {
  const Format format = format_of(arguments.output);
  require(!arguments.stream.compare || !arguments.show,
          "--compare shows everything; leave --show out");
  const auto [mask, ownership, second] = stream_of(arguments.stream);
  const Packing& packing = mask.packing();
  DrawOptions options;
  // In text two letters make a square cell, unless documents need the detail.
  if (format == Format::text &&
      (packing.documents() < 2 || packing.tokens() > options.strip_cells)) {
    options.grid_cells = 32;
  }
  write(second ? draw_comparison(mask, ownership, *second, options)
               : picture_of(arguments, mask, ownership, options),
        arguments.output);
}

}  // namespace

Command add_draw(CLI::App& program) {
  CLI::App& draw = *program.add_subcommand(
      "draw", "Draw who owns which token, who computes what, and the work");
  auto arguments = std::make_shared<DrawArguments>();
  add_stream(draw, arguments->stream);
  add_text(draw, "--compare", arguments->stream.compare,
           "A second layout, drawn beside", "NAME");
  add_text(draw, "--show", arguments->show,
           "all (default), ownership, mask, steps, work; states: runs of "
           "documents and what recurrent layers send between them",
           "NAME");
  add_output(draw, arguments->output);
  return [arguments, &draw] {
    check_once(draw);
    run_draw(*arguments);
  };
}

}  // namespace longspan::cli
