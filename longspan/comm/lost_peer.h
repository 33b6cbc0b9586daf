#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "longspan/comm/group.h"

namespace longspan {

/// A peer did not answer in time, or is gone. The group is unusable after that.
///
/// It is torch's own error of a failed backend, which keeps its type on every
/// way into Python, also out of a backward pass: there it is
/// torch.distributed.DistBackendError, a RuntimeError.
class LostPeer : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

/// Throws LostPeer: "<purpose>: rank 1 waited 5 s for rank 0: <cause>; ...".
/// peer -1 stands for the whole group.
///
/// Backends tell a lost peer from other failures by the text of the error alone
/// (gloo throws std::runtime_error for both). So whatever they throw while a
/// message is under way becomes this type here; the text is passed on and never
/// parsed.
[[noreturn]] void throw_lost_peer(const Group& group,
                                  const std::string& purpose, int peer,
                                  std::optional<std::chrono::milliseconds> time,
                                  std::string_view cause);

}  // namespace longspan
