#pragma once

#include <stdexcept>
#include <string>

namespace longspan {

/// A promise of the library itself was broken: a bug, never a caller's mistake.
/// Mistakes of callers are std::invalid_argument, and failures of the outside
/// world are std::runtime_error, but for a lost peer: comm's LostPeer is
/// torch's own error of a failed backend.
class InternalError : public std::logic_error {
 public:
  explicit InternalError(const std::string& what)
      : std::logic_error("longspan bug, please report: " + what) {}
};

}  // namespace longspan
