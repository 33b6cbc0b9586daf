#include "options.h"

#include <CLI/CLI.hpp>

#include "outcome.h"

namespace longspan::cli {

void add_text(CLI::App& command, const char* name,
              std::optional<std::string>& value, const char* help,
              const char* kind) {
  command
      .add_option_function<std::string>(
          name, [&value](const std::string& came) { value = came; }, help)
      ->type_name(kind)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void check_once(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    require(option->count() <= 1, option->get_name(), " came ", option->count(),
            " times; expected it once");
  }
}

}  // namespace longspan::cli
