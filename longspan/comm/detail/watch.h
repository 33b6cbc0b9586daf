#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace longspan {

/// Names a process for others on the same machine.
struct ProcessMark {
  std::string machine;  ///< this boot of this kernel, and what it calls pids
  int64_t pid = 0;
  int64_t started = 0;  ///< in the kernel's ticks, since pids are used again
  std::string host;     ///< for messages

  static ProcessMark mine();
  std::string encode() const;
  static std::optional<ProcessMark> decode(std::string_view text);

  /// Whether it has ended; false where that cannot be known from here. A
  /// process that is stopped has not ended.
  bool is_gone() const;

  /// Whether it runs where is_gone() cannot see it.
  bool is_elsewhere() const;

  std::string to_string() const;  ///< "process 77 on node3"
};

/// While anything is in it, wakes it again and again.
///
/// A wait inside a backend cannot look around: it is woken every 100 ms, looks
/// whether it should go on, and does. One thread serves all waits of a process
/// and ends when there are none for a while.
class Alarms {
 public:
  static constexpr std::chrono::milliseconds kPause{100};

  /// Calls `wake` every kPause until it is destroyed, from another thread.
  class Alarm {
   public:
    explicit Alarm(std::function<void()> wake);
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;
    ~Alarm();

   private:
    std::function<void()> wake_;
    std::chrono::steady_clock::time_point since_;
    friend class Alarms;
  };

 private:
  struct State;
  static State& state();
  static void run();
};

/// Runs an errand on a thread beside, one after another: what talks to a store
/// may block for as long as the store's host is stopped.
void run_beside(std::function<void()> errand);

/// Called by waits every 100 ms on their own thread; may throw, which ends the
/// wait. The Python module looks for signals here. Null: nothing.
void set_wait_hook(void (*hook)());
void call_wait_hook();

}  // namespace longspan
