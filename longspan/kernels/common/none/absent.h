#pragma once

#include <string>

#include "longspan/core/check.h"

namespace longspan {

/// What stands for kernels where there is no CUDA compiler.

inline std::string no_compiler() {
  return "longspan was built without a CUDA compiler";
}

[[noreturn]] inline void never(const char* who) {
  throw InternalError(std::string(who) + ": called although it cannot run");
}

}  // namespace longspan
