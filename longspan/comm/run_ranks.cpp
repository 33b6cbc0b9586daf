#include "longspan/comm/run_ranks.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/gloo_groups.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

/// The error to report: the first one, unless it only says that a peer left
/// and the peer says why.
class FirstError {
 public:
  void note(std::exception_ptr error) {
    const bool consequence = is_lost_peer(error);
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr || (consequence_ && !consequence)) {
      error_ = std::move(error);
      consequence_ = consequence;
    }
  }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  static bool is_lost_peer(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const LostPeer&) {
      return true;
    } catch (...) {
      return false;
    }
  }

  std::mutex mutex_;
  std::exception_ptr error_;
  bool consequence_ = false;
};

/// The groups of one run, by rank, which keeps them alive.
class Groups {
 public:
  explicit Groups(std::string run, int ranks)
      : run_(std::move(run)), groups_(static_cast<std::size_t>(ranks)) {}

  std::string name(int rank) const { return join(run_, rank); }

  /// What the body gets keeps nothing alive after the run.
  Group add(Group made) {
    const std::lock_guard lock(mutex_);
    if (failed_) interrupt(made, *failed_);
    const Group known = Group::named(made.name());
    groups_[static_cast<std::size_t>(made.rank())] = std::move(made);
    return known;
  }

  /// Peers that wait for this rank must not wait for the deadline.
  void fail(int rank) {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_ = join("rank ", rank, " ended with an error");
    close(rank);
    for (const auto& peer : groups_) {
      if (peer) interrupt(*peer, *failed_);
    }
  }

  void close_all() {
    const std::lock_guard lock(mutex_);
    for (int rank = 0; rank < std::ssize(groups_); ++rank) close(rank);
  }

 private:
  void close(int rank) {
    std::optional<Group>& group = groups_[static_cast<std::size_t>(rank)];
    if (group) close_gloo_group(*group);
    group.reset();
  }

  std::mutex mutex_;
  std::string run_;
  std::optional<std::string> failed_;
  std::vector<std::optional<Group>> groups_;
};

}  // namespace

void run_ranks(int ranks, const std::function<void(const Group&)>& body,
               RunOptions options) {
  check(ranks > 0, "run_ranks: ", ranks, " ranks; expected one or more");
  if (ranks == 1) return body(Group::solo());

  static std::atomic<int64_t> runs = 0;
  Groups groups(join("longspan/run/", runs++, "/"), ranks);
  const auto place = meet_here(options.timeout);
  FirstError error;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(groups.add(make_gloo_group({.place = place,
                                         .rank = rank,
                                         .size = ranks,
                                         .name = groups.name(rank),
                                         .timeout = options.timeout})));
      } catch (...) {
        error.note(std::current_exception());
        groups.fail(rank);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  groups.close_all();
  error.rethrow();
}

}  // namespace longspan
