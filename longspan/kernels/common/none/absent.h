#pragma once

#include <string>

#include "longspan/core/detail/check.h"

namespace longspan {

/// Stands in for kernels in builds without a CUDA compiler.

inline std::string no_compiler() {
  return "longspan was built without a CUDA compiler";
}

[[noreturn]] inline void never(const char* who) {
  throw InternalError(std::string(who) + ": called although it cannot run");
}

}  // namespace longspan
