#include "output.h"

#include <CLI/CLI.hpp>

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <system_error>

#include "json.h"
#include "longspan/core/detail/check.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "options.h"
#include "outcome.h"

namespace longspan::cli {

namespace {

namespace fs = std::filesystem;

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

template <class Cannot>
void write_to(const fs::path& path, const std::string& text,
              const Cannot& cannot) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  if (!file) throw Refusal(cannot());  // a wrong path
  file << text;
  file.close();
  if (!file) throw Failure(cannot());  // a full disk
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
  // A link stays one: what it leads to is replaced.
  std::error_code ignored;
  fs::path target = fs::weakly_canonical(*path, ignored);
  if (target.empty()) target = *path;
  const auto is = fs::status(target, ignored);
  if (fs::exists(is) && !fs::is_regular_file(is)) {
    write_to(target, text, cannot);  // a pipe, a terminal; not a folder
    return;
  }
  errno = 0;
  if (fs::exists(is) && access(target.c_str(), W_OK) != 0) {
    throw Refusal(cannot());
  }
  // Beside it first, so that a full disk or a signal leaves the old file whole.
  const fs::path beside = target.string() + join(".", getpid(), ".part");
  try {
    write_to(beside, text, cannot);
    if (fs::exists(is)) fs::permissions(beside, is.permissions(), ignored);
    errno = 0;
    if (std::rename(beside.c_str(), target.c_str()) != 0) {
      throw Failure(cannot());
    }
  } catch (...) {
    fs::remove(beside, ignored);
    throw;
  }
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
