#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace longspan {

/// How a process learns that one on another machine has ended.
///
/// Every process that has peers elsewhere listens on a port of its own and
/// never answers: the kernel takes the connections, and cuts them all when the
/// process ends, however it ends. So a peer holds one open and looks at it.
/// A cut alone proves nothing, since a router may have done it: the peer knocks
/// once more, and only a machine that answers "nobody listens here" says that
/// the process is gone. A machine that does not answer at all says nothing;
/// that is what deadlines are for.
class Lifeline {
 public:
  /// Where this process can be reached from other machines, "10.0.0.3 40123";
  /// empty where no address of it is known. Listens from the first call on.
  static std::string address();

  /// A connection to that of another process, shared by all who ask for the
  /// same; null where there is none. Takes up to `patience`.
  static std::shared_ptr<Lifeline> to(const std::string& address,
                                      std::chrono::milliseconds patience);

  explicit Lifeline(std::string address, int connection);
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;
  ~Lifeline();

  /// Whether the process has ended; takes a moment where the line is cut.
  bool is_gone();

 private:
  const std::string address_;
  std::mutex mutex_;
  int connection_ = -1;  // -1: it is cut, and the machine did not answer since
  std::chrono::steady_clock::time_point next_knock_ = {};
  bool gone_ = false;
};

}  // namespace longspan
