#pragma once

// The one header of ours that knows c10d; only group.cpp, group_record.cpp,
// call.cpp, backends.cpp and gloo_groups.cpp include it, since it takes seconds
// to compile.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "longspan/comm/detail/call_history.h"
#include "longspan/comm/detail/lifeline.h"
#include "longspan/comm/detail/watch.h"

namespace longspan {

/// Why a wait ended that nothing came of.
struct WaitEnded : std::runtime_error {
  /// The rank to blame; -1 where the backend knows better.
  int peer = -1;
  WaitEnded(const std::string& why, int peer)
      : std::runtime_error(why), peer(peer) {}
};

/// The wait hook threw: the reason goes to the caller as it is.
struct WaitStopped {
  std::exception_ptr reason;
};

/// What all Group values of one process group share. It lives as long as they
/// or the process group do.
///
/// Beside the exchanges the ranks talk through the group's store: a rank that
/// waits for longer than usual, or that raises, leaves its history of calls
/// there and reads those of the others.
struct GroupRecord : std::enable_shared_from_this<GroupRecord> {
  GroupRecord(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
              std::string name);

  /// Weak, which also keeps its address from being reused by another group.
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group;
  const std::string name;
  const int rank, size;
  /// A forked child has the memory of its parent, but not its threads.
  const int64_t process;
  std::atomic<int64_t> sent_bytes = 0;
  /// Nanoseconds, of the host.
  std::atomic<int64_t> waited = 0;
  /// Milliseconds; 0: that of the process group.
  std::atomic<int64_t> timeout = 0;

  /// Whether the first exchange brought all ranks together, which backends that
  /// connect lazily need.
  std::atomic<bool> connected = false;

  // ---- Waits.

  /// Waits for work unless, or until, the group is interrupted or another rank
  /// is known to be gone or to do something else: then throws WaitEnded,
  /// Disagreement, or WaitStopped.
  void wait(const c10::intrusive_ptr<c10d::Work>& work,
            std::chrono::milliseconds timeout);

  /// Ends all waits, now and later. gloo itself goes on waiting when the peer
  /// dies in the middle of a message.
  void interrupt(const std::string& why);

  /// The backend lost `peer`: who is to blame, as far as can be known soon.
  /// Throws Disagreement where that is why. Tells the others.
  WaitEnded blame(int peer, std::string why);

  /// Work that nobody waits for any more. Its buffers must outlive a message
  /// under way, and gloo cannot be asked whether it is done with them.
  void abandon(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  /// Drops abandoned work; only when the group is closed.
  void forget_abandoned();

  // ---- Calls; see call.h.

  /// False where this thread is inside a call already.
  bool enter(const char* who);
  void leave();
  void begin(std::string text);
  /// The call under way raised, or something outside of calls.
  void fail(const std::string& what);
  /// The call under way left by a Disagreement; all may go on, or none.
  void fail_together();
  uint64_t tag_seed();
  int64_t calls();
  /// Whether nothing began since a call raised.
  bool raised_last();

 private:
  using Histories = std::vector<std::optional<CallHistory>>;

  /// These hold mutex_.
  void throw_if_interrupted();
  void throw_if_different();
  std::vector<int> gone_ranks();
  /// One that does not go on, or was lost, as a rank said.
  std::optional<int> rank_said_lost();
  /// Whether this rank looks after that one, on another machine. Two on either
  /// side do, and tell the rest.
  bool looks_after(int other) const;
  /// Whether a line to such a rank is not there yet.
  bool lacks_lines() const;

  void check_others(std::chrono::steady_clock::duration waited);
  void meet();
  /// Leaves our history in the store and reads the others'; on a thread beside,
  /// and `limit` is how long the caller waits for that.
  void look(std::chrono::milliseconds limit);
  void exchange_histories();
  /// Lets ranks on other machines see this process end, and looks after some
  /// of them in turn; of exchange_histories().
  void hold_lines(const std::vector<std::optional<ProcessMark>>& processes,
                  const std::function<std::string(const std::string&)>& get);
  std::string key(const char* what, int of) const;

  std::mutex mutex_;
  std::optional<std::string> interrupted_;
  std::vector<c10d::Work*> waiting_;
  std::vector<c10::intrusive_ptr<c10d::Work>> abandoned_;

  // Under mutex_ as well.
  CallHistory history_;
  std::thread::id caller_;
  bool in_call_ = false;
  bool begun_ = false;  // the call under way is in the history
  Histories others_;
  std::vector<std::optional<ProcessMark>> processes_;
  std::vector<std::shared_ptr<Lifeline>> lines_;
  SeenTexts seen_;
  std::optional<bool> is_nccl_;
  bool disagreed_ = false;  // which is why it is interrupted
  const char* who_ = "";    // of the call under way
  int64_t looks_asked_ = 0, looks_done_ = 0;
  bool looking_ = false;
  std::chrono::steady_clock::time_point next_look_ = {};
  std::chrono::milliseconds look_pause_{0};
  std::condition_variable looked_;

  // Of exchange_histories() alone. Its thread never holds the process group,
  // which would not end then when it is destroyed.
  const c10::weak_intrusive_ptr<c10d::Store> shared_store_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string published_;
  bool listens_ = false;
  std::atomic<bool> marked_ = false;
};

}  // namespace longspan
