#include "output.h"

#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>

#include "json.h"
#include "longspan/core/detail/check.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "options.h"
#include "outcome.h"

namespace longspan::cli {

namespace {

Format named_format(const OutputArguments& arguments) {
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

void write_text(const std::optional<std::string>& path,
                const std::string& text) {
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

}  // namespace

void add_output(CLI::App& command, OutputArguments& arguments) {
  add_text(command, "--format", arguments.format,
           "svg, text or json; else by the file's name, else text", "NAME");
  add_text(command, "-o,--output", arguments.output,
           "File to write; - is the terminal", "FILE");
  command.add_flag("--ascii", arguments.ascii, "Text in plain ASCII");
  command.add_flag("--color", arguments.color, "Text with ANSI colours");
}

Format format_of(const OutputArguments& arguments) {
  const Format format = named_format(arguments);
  require(format == Format::text || !(arguments.ascii || arguments.color),
          arguments.ascii ? "--ascii" : "--color",
          " goes with text; leave it out or say --format text");
  return format;
}

void write(const Picture& picture, const OutputArguments& arguments) {
  const Format format = format_of(arguments);
  TextOptions text;
  text.glyphs = arguments.ascii ? Glyphs::ascii : Glyphs::unicode;
  text.ink = arguments.color ? Ink::ansi : Ink::plain;
  write_text(arguments.output, format == Format::svg ? to_svg(picture)
                               : format == Format::json
                                   ? to_json(picture)
                                   : to_text(picture, text));
}

}  // namespace longspan::cli
