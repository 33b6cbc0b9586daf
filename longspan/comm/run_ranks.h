#pragma once

#include <chrono>
#include <functional>

#include "longspan/comm/group.h"

namespace longspan {

struct RunOptions {
  /// How long a rank waits for another before it gives up.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

/// Runs `body` on `ranks` threads of this process, each a rank of one group
/// over gloo on the loopback device (one rank: solo, on this thread). For tests
/// and examples: communication is real, only the processes are not.
///
/// Groups are registered while `body` runs, so that operators find them by
/// name. When a rank throws, its connections close, the others end, and the
/// first error that is not the consequence of another one is rethrown.
///
/// Each rank has torch's usual number of threads; where many ranks share few
/// cores, call at::set_num_threads(1) inside `body`. Backward passes of CUDA
/// tensors share one thread per device, so ranks that wait for each other there
/// must be processes.
void run_ranks(int ranks, const std::function<void(const Group&)>& body,
               RunOptions options = {});

}  // namespace longspan
