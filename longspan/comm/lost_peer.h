#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "longspan/comm/group.h"

namespace longspan {

/// A peer did not answer in time, or is gone. The group is of no use after it.
///
/// It is torch's own error of a failed backend, which keeps its type on all
/// ways into Python, out of a backward pass too: there it is
/// torch.distributed.DistBackendError, a RuntimeError.
class LostPeer : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

/// Throws LostPeer: "<purpose>: rank 1 waited 5 s for rank 0: <cause>; ...".
/// peer -1 stands for the whole group.
///
/// Backends tell a lost peer from other failures by nothing but their words
/// (gloo throws std::runtime_error for both), so whatever they throw while a
/// message is under way comes here, and is this type from then on; the words
/// are passed on and never asked.
[[noreturn]] void throw_lost_peer(const Group& group,
                                  const std::string& purpose, int peer,
                                  std::optional<std::chrono::milliseconds> time,
                                  std::string_view cause);

}  // namespace longspan
