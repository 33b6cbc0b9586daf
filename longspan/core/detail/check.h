#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "longspan/core/errors.h"

namespace longspan {

/// Parts of a message, joined without separators.
template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Throws std::invalid_argument with the joined parts unless `condition` holds:
/// a caller's mistake. Messages name who speaks, what came, and the way out.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw std::invalid_argument(join(parts...));
  }
}

/// Throws InternalError unless `condition` holds: a promise of our own.
template <class... Parts>
void promise(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw InternalError(join(parts...));
  }
}

}  // namespace longspan
