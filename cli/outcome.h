#pragma once

#include <stdexcept>

#include "longspan/core/detail/check.h"

namespace longspan::cli {

/// What the command line answers to the shell.
enum class Exit : int { done = 0, failed = 1, refused = 2 };

/// An argument that cannot be served: one sentence, exit code 2.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw Refusal(join(parts...));
}

/// The outside world failed (a file that cannot be written): exit code 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace longspan::cli
