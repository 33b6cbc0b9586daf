#pragma once

#include <optional>
#include <string>

#include "longspan/draw/picture.h"

namespace CLI {
class App;
}  // namespace CLI

namespace longspan::cli {

/// Where a picture goes and how it looks, as the arguments came.
struct OutputArguments {
  std::optional<std::string> format, output;
  bool ascii = false;
  bool color = false;
};

void add_output(CLI::App& command, OutputArguments& arguments);

enum class Format { text, svg, json };

/// From --format, else from the file's name, else text. Refuses --ascii and
/// --color where there is no text.
Format format_of(const OutputArguments& arguments);

/// To the file, or to the terminal.
void write(const Picture& picture, const OutputArguments& arguments);

}  // namespace longspan::cli
