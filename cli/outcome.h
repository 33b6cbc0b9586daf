#pragma once

#include <stdexcept>

namespace longspan::cli {

/// What the command line answers to the shell.
enum class Exit : int { done = 0, failed = 1, refused = 2 };

/// An argument that cannot be served: one sentence, exit code 2.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The outside world failed (a file that cannot be written): exit code 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace longspan::cli
