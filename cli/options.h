#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}  // namespace CLI

namespace longspan::cli {

/// An option that takes one text; `value` must outlive the command.
void add_text(CLI::App& command, const char* name,
              std::optional<std::string>& value, const char* help,
              const char* kind);

/// Refuses an option or a flag that came twice.
void check_once(const CLI::App& command);

}  // namespace longspan::cli
