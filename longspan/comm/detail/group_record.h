#pragma once

// The one header of ours that knows c10d; only group.cpp, backends.cpp and
// gloo_groups.cpp include it, since it takes seconds to compile.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace longspan {

/// What all Group values of one process group share. It lives as long as they
/// or the process group do.
struct GroupRecord {
  GroupRecord(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
              std::string name)
      : process_group(process_group), name(std::move(name)) {}

  /// Weak, which also keeps its address from being reused by another group.
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group;
  const std::string name;
  std::atomic<int64_t> sent_bytes = 0;

  /// Whether the first exchange brought all ranks together, which backends that
  /// connect lazily need.
  std::atomic<bool> connected = false;

  /// Waits for work unless, or until, the group is interrupted: then throws
  /// what interrupt() was told. False when the work was aborted otherwise.
  bool wait(const c10::intrusive_ptr<c10d::Work>& work,
            std::chrono::milliseconds timeout);

  /// Ends all waits, now and later. gloo itself goes on waiting when the peer
  /// dies in the middle of a message.
  void interrupt(const std::string& why);

  /// Work that nobody waits for any more. Its buffers must outlive a message
  /// under way, and gloo cannot be asked whether it is done with them.
  void abandon(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  /// Drops abandoned work; only when the group is closed.
  void forget_abandoned();

 private:
  std::mutex mutex_;
  std::optional<std::string> interrupted_;
  std::vector<c10d::Work*> waiting_;
  std::vector<c10::intrusive_ptr<c10d::Work>> abandoned_;
};

}  // namespace longspan
