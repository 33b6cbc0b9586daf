/// The `longspan` program: pictures and facts for people and scripts.
///
/// Always true: an argument that cannot be served gets one sentence on standard
/// error and exit code 2, a failing outside world exit code 1.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "commands.h"
#include "outcome.h"

namespace {

using longspan::cli::Exit;

/// Commands that ask models, which live in Python.
constexpr std::string_view kInPython[] = {"estimate", "train", "verify"};

/// Messages of others as one line.
std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// "--flag=" would take the next argument for its value.
std::string flag_without_value(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--") && argument.ends_with('=') &&
        argument.find('=') + 1 == argument.size()) {
      return std::string(argument);
    }
  }
  return "";
}

int answer(const std::string& who, const std::string& sentence, Exit exit) {
  std::cerr << who << ": " << one_line(sentence) << "\n";
  return static_cast<int>(exit);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Context parallelism: who owns which token, drawn",
                   "longspan");
  program.set_version_flag("--version", "longspan " LONGSPAN_VERSION);
  const auto draw = longspan::cli::add_draw(program);
  const auto plan = longspan::cli::add_plan(program);
  const auto info = longspan::cli::add_info(program);
  program.require_subcommand(0, 1);

  const std::string first = argc > 1 ? argv[1] : "";
  const bool named = first == "draw" || first == "plan" || first == "info";
  const std::string who = named ? "longspan " + first : "longspan";
  if (std::ranges::find(kInPython, first) != std::ranges::end(kInPython)) {
    return answer("longspan " + first,
                  "models live in Python; run python -m longspan " + first,
                  Exit::refused);
  }
  if (const std::string flag = flag_without_value(argc, argv); !flag.empty()) {
    return answer(who, "'" + flag + "' has no value; write one after it",
                  Exit::refused);
  }
  try {
    program.parse(argc, argv);
    if (program.got_subcommand("draw")) {
      draw();
    } else if (program.got_subcommand("plan")) {
      plan();
    } else if (program.got_subcommand("info")) {
      info();
    } else {
      return answer(who, "no command came; try longspan draw --help",
                    Exit::refused);
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);
    return answer(who, std::string(error.what()) + "; see " + who + " --help",
                  Exit::refused);
  } catch (const longspan::cli::Refusal& refusal) {
    return answer(who, refusal.what(), Exit::refused);
  } catch (const std::invalid_argument& refusal) {
    return answer(who, refusal.what(), Exit::refused);
  } catch (const std::exception& failure) {
    return answer(who, failure.what(), Exit::failed);
  }
  return static_cast<int>(Exit::done);
}
