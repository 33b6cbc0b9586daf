#pragma once

#include <functional>

namespace CLI {
class App;
}  // namespace CLI

namespace longspan::cli {

/// Each adds its command to the program and returns what runs once arguments
/// are parsed. Running throws Refusal, Failure or the library's own errors.
using Command = std::function<void()>;
Command add_draw(CLI::App& program);
Command add_info(CLI::App& program);
Command add_plan(CLI::App& program);

}  // namespace longspan::cli
