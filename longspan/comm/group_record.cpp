#include "longspan/comm/detail/group_record.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string_view>

#include "longspan/comm/detail/call.h"
#include "longspan/comm/disagreement.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// A wait that is longer than this is looked into.
constexpr milliseconds kUsual{150};
/// How often a rank looks what the others do while it waits.
constexpr milliseconds kFirstPause{100}, kLongestPause{500};
/// How long telling and asking may hold up an error.
constexpr milliseconds kPatience{500};
/// How long a rank that gives another one up stays.
constexpr milliseconds kGrace{300};
/// Ranks without tags on their messages compare every so many calls.
constexpr int64_t kCallsBetween = 256;

/// Calls after which no rank is looked for any more that could not be reached.
constexpr uint64_t kLastLook = 1 << 16;
/// How long a machine has to answer the first time.
constexpr milliseconds kFirstAnswer{300};

enum class Agree { off, first, every };

Agree agreement() {
  static const Agree chosen = [] {
    const char* const value = std::getenv("LONGSPAN_AGREE");
    const std::string_view name = value == nullptr ? "" : value;
    if (name.empty() || name == "first") return Agree::first;
    if (name == "every") return Agree::every;
    check(name == "off", "LONGSPAN_AGREE is '", name,
          "'; expected 'first', 'every' or 'off'");
    return Agree::off;
  }();
  return chosen;
}

/// LONGSPAN_TIMEOUT, in seconds; 0 when unset.
int64_t timeout_of_environment() {
  const char* const value = std::getenv("LONGSPAN_TIMEOUT");
  if (value == nullptr || *value == '\0') return 0;
  char* end = nullptr;
  const double seconds = std::strtod(value, &end);
  check(*end == '\0' && seconds > 0 && seconds < 1e9, "LONGSPAN_TIMEOUT is '",
        value, "'; expected a number of seconds");
  return std::max<int64_t>(static_cast<int64_t>(seconds * 1000), 1);
}

bool is_nccl(c10d::ProcessGroup& process_group) {
  for (const at::Device device : process_group.getDeviceTypes()) {
    if (process_group.getBackend(device.type())->getBackendName() == "nccl") {
      return true;
    }
  }
  return false;
}

/// A connection of its own where the store has them: a request that waits
/// blocks the others of its connection.
c10::intrusive_ptr<c10d::Store> own_connection(
    const c10::intrusive_ptr<c10d::Store>& store) {
  if constexpr (requires { store->clone(); }) {
    try {
      return store->clone();
    } catch (const std::exception&) {  // a store of Python may not offer it
    }
  }
  return store;
}

/// The hook of waits; what it throws goes to the caller as it is.
void stop_where_hooked() {
  try {
    call_wait_hook();
  } catch (...) {
    throw WaitStopped{std::current_exception()};
  }
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

bool compares_calls() {
  return agreement() != Agree::off;
}

GroupRecord::GroupRecord(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    std::string name)
    : process_group(process_group),
      name(std::move(name)),
      rank(process_group->getRank()),
      size(process_group->getSize()),
      process(getpid()),
      timeout(timeout_of_environment()),
      others_(static_cast<std::size_t>(size)),
      processes_(static_cast<std::size_t>(size)),
      lines_(static_cast<std::size_t>(size)),
      shared_store_(process_group->getStore()) {}

// ---- Waits.

void GroupRecord::wait(const c10::intrusive_ptr<c10d::Work>& work,
                       milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_interrupted();
    waiting_.push_back(work.get());
  }
  const auto leave = [&] {
    const std::lock_guard lock(mutex_);
    std::erase(waiting_, work.get());
  };
  const auto start = Clock::now();
  try {
    // Aborting a wait of gloo ends that wait alone, and it can be taken up
    // again; waiting in slices would close the connection at the first one.
    const Alarms::Alarm alarm([&work] { work->abort(); });
    for (;;) {
      const auto passed = Clock::now() - start;
      const auto left = std::chrono::duration_cast<milliseconds>(
          std::chrono::nanoseconds(timeout) - passed);
      // At least 1 ms: c10d takes 0 for its own default.
      if (work->wait(std::max(left, milliseconds(1)))) break;
      {
        const std::lock_guard lock(mutex_);
        throw_if_interrupted();
      }
      stop_where_hooked();
      check_others(Clock::now() - start);
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void GroupRecord::throw_if_interrupted() {
  if (!interrupted_) return;
  if (disagreed_) throw Disagreement(*interrupted_);
  throw WaitEnded(*interrupted_, -1);
}

void GroupRecord::interrupt(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!interrupted_) interrupted_ = why;
  for (c10d::Work* work : waiting_) work->abort();
}

void GroupRecord::throw_if_different() {
  if (agreement() == Agree::off) return;
  const auto found = compare(rank, history_, in_call_ && begun_, others_);
  if (!found) return;
  std::string text =
      join(*who_ == '\0' ? "Group" : who_, ": ", found->text,
           found->is_common_end
               ? "; look at the log of that rank"
               : "; make every rank do the same calls in the same order");
  if (!found->is_common_end) {
    interrupted_ = text;
    disagreed_ = true;
  }
  throw Disagreement(std::move(text));
}

std::vector<int> GroupRecord::gone_ranks() {
  std::vector<int> gone;
  for (int other = 0; other < size; ++other) {
    const auto r = static_cast<std::size_t>(other);
    // Who gave up on somebody and then ended is not to blame.
    const bool gave_up = others_[r] && others_[r]->lost();
    if (other != rank && !gave_up && processes_[r] &&
        (processes_[r]->is_gone() || (lines_[r] && lines_[r]->is_gone()))) {
      gone.push_back(other);
    }
  }
  return gone;
}

std::optional<int> GroupRecord::rank_said_lost() {
  for (int other = 0; other < size; ++other) {
    const auto& known = others_[static_cast<std::size_t>(other)];
    if (other != rank && known && known->lost() && *known->lost() != rank) {
      return known->lost();
    }
  }
  return std::nullopt;
}

bool GroupRecord::looks_after(int other) const {
  const int apart = std::abs(other - rank);
  return other != rank && std::min(apart, size - apart) <= 2;
}

bool GroupRecord::lacks_lines() const {
  for (int other = 0; other < size; ++other) {
    const auto r = static_cast<std::size_t>(other);
    if (looks_after(other) && !lines_[r] &&
        (!processes_[r] || processes_[r]->is_elsewhere())) {
      return true;
    }
  }
  return false;
}

void GroupRecord::check_others(Clock::duration waited) {
  bool due = false;
  std::vector<int> gone;
  {
    const std::lock_guard lock(mutex_);
    throw_if_different();
    gone = gone_ranks();
    if (const auto lost = rank_said_lost()) gone.push_back(*lost);
    const auto now = Clock::now();
    due = waited >= kUsual && now >= next_look_;
    if (due) {
      look_pause_ = std::clamp(look_pause_ * 2, kFirstPause, kLongestPause);
      next_look_ = now + look_pause_;
    }
  }
  if (!gone.empty()) throw WaitEnded("is gone", gone[0]);  // see blame()
  if (due) look(milliseconds(0));
}

WaitEnded GroupRecord::blame(int peer, std::string why) {
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_ && !disagreed_) return {*interrupted_, peer};
    throw_if_interrupted();
  }
  // What the others know, and whether one of them raised before it ended.
  look(kPatience);
  {
    const std::lock_guard lock(mutex_);
    throw_if_different();
    if (const auto gone = gone_ranks(); !gone.empty()) {
      peer = gone[0];
      why = "";
      for (const int each : gone) {
        const auto r = static_cast<std::size_t>(each);
        why += join(why.empty() ? "" : ", and ",
                    each == peer ? "" : join("rank ", each, ": "),
                    processes_[r]->to_string(), " is gone");
      }
    } else {
      for (const auto& other : others_) {
        if (!other || !other->lost() || *other->lost() == rank) continue;
        peer = *other->lost();
        why = other->why_lost();
        break;
      }
    }
    history_.lose(peer, why);
  }
  look(kPatience);
  // This process may serve the store: others that wait see for themselves, and
  // do not take the end of this one for the cause.
  std::this_thread::sleep_for(kGrace);
  return {why, peer};
}

void GroupRecord::abandon(std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  const std::lock_guard lock(mutex_);
  for (auto& work : works) abandoned_.push_back(std::move(work));
}

void GroupRecord::forget_abandoned() {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const std::lock_guard lock(mutex_);
  works.swap(abandoned_);
}

// ---- Calls.

bool GroupRecord::enter(const char* who) {
  check(getpid() == process, who, ": the group belongs to process ", process,
        " and this is a child that it forked, whose connections are the "
        "parent's; communicate in the process that made the group (a "
        "DataLoader's worker may shard with check_agreement=False)");
  std::unique_lock lock(mutex_);
  if (in_call_) {
    if (caller_ == std::this_thread::get_id()) return false;
    // Which of the two comes first may differ between ranks, so neither can be
    // trusted any more.
    const std::string why =
        join(who, ": another thread is inside a call of this group (", who_,
             "); a group serves one thread at a time, so make one for each");
    if (!interrupted_) interrupted_ = why;
    disagreed_ = true;
    history_.lose(rank, "two threads used the group at once");
    for (c10d::Work* work : waiting_) work->abort();
    lock.unlock();
    look(kPatience);
    throw Disagreement(why);
  }
  in_call_ = true;
  begun_ = false;
  who_ = who;
  caller_ = std::this_thread::get_id();
  return true;
}

void GroupRecord::leave() {
  const std::lock_guard lock(mutex_);
  in_call_ = false;
  begun_ = false;
}

void GroupRecord::begin(std::string text) {
  bool compares = agreement() == Agree::every;
  std::optional<milliseconds> patience;  // with a look, where there is one
  if (!marked_.exchange(true)) {
    if (const auto group = process_group.lock();
        group.defined() && group->getStore().defined()) {
      try {
        group->getStore()->set(key("process", rank),
                               bytes_of(ProcessMark::mine().encode()));
      } catch (const std::exception&) {  // then nobody sees it end
      }
    }
  }
  if (!compares_calls()) return;
  {
    const std::lock_guard lock(mutex_);
    if (disagreed_) throw_if_interrupted();
    text = quickly(who_, "; ", text);
    history_.begin(text);
    begun_ = true;
    // Once, now that the others have been here: later the store may be gone.
    // Those on other machines answer each other, which takes a few looks.
    const auto calls = static_cast<uint64_t>(history_.calls());
    // The first is waited for: it would be under way when a short program ends.
    if (calls == 2) {
      patience = kPatience;
    } else if (calls > 2 && calls <= kLastLook && std::has_single_bit(calls) &&
               lacks_lines()) {
      patience = milliseconds(0);
    }
    look_pause_ = milliseconds(0);
    if (agreement() == Agree::first) {
      if (!is_nccl_) {
        const auto group = process_group.lock();
        is_nccl_ = group.defined() && is_nccl(*group);
      }
      if (*is_nccl_) {
        compares = history_.calls() % kCallsBetween == 0 || seen_.add(text);
      }
    }
  }
  if (patience) look(*patience);
  if (compares) meet();
}

void GroupRecord::fail(const std::string& what) {
  if (getpid() != process || !compares_calls()) return;
  {
    const std::lock_guard lock(mutex_);
    // Nor may a thread that was refused end the call of another.
    if (interrupted_ || (in_call_ && caller_ != std::this_thread::get_id())) {
      return;
    }
    history_.raise(what, in_call_ && begun_);
  }
  look(kPatience);
}

void GroupRecord::fail_together() {
  {
    const std::lock_guard lock(mutex_);
    if (!interrupted_) {
      history_.raise("left the call as another rank raised",
                     in_call_ && begun_);
    }
  }
  // Others wait for the call that this rank was in, and must see that it was.
  look(kPatience);
}

uint64_t GroupRecord::tag_seed() {
  if (agreement() == Agree::off) return 0;
  const std::lock_guard lock(mutex_);
  return history_.hash();
}

int64_t GroupRecord::calls() {
  if (getpid() != process) return 0;
  const std::lock_guard lock(mutex_);
  return history_.calls();
}

bool GroupRecord::raised_last() {
  if (getpid() != process) return false;
  const std::lock_guard lock(mutex_);
  const CallHistory::Entry* const last = history_.call(history_.calls());
  return last != nullptr && last->raised;
}

void GroupRecord::meet() {
  const auto group = process_group.lock();
  if (!group.defined() || !group->getStore().defined()) return;
  const auto start = Clock::now();
  const milliseconds limit(timeout > 0 ? timeout.load() : int64_t{1'800'000});
  for (;;) {
    look(kPatience);
    {
      const std::lock_guard lock(mutex_);
      throw_if_interrupted();
      throw_if_different();
      const bool all = std::ranges::all_of(others_, [&](const auto& other) {
        return &other == &others_[static_cast<std::size_t>(rank)] ||
               (other && other->calls() >= history_.calls());
      });
      if (all) return;
      if (const auto gone = gone_ranks(); !gone.empty()) {
        throw WaitEnded("is gone", gone[0]);
      }
    }
    stop_where_hooked();
    if (Clock::now() - start > limit) {
      throw WaitEnded("the ranks did not come together to compare a call", -1);
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
}

// ---- The store.

std::string GroupRecord::key(const char* what, int of) const {
  return join("longspan/", what, "/", of);
}

void GroupRecord::look(milliseconds limit) {
  std::unique_lock lock(mutex_);
  const int64_t wanted = ++looks_asked_;
  if (!looking_) {
    looking_ = true;
    run_beside([self = shared_from_this()] { self->exchange_histories(); });
  }
  looked_.wait_for(lock, limit, [&] { return looks_done_ >= wanted; });
}

void GroupRecord::hold_lines(
    const std::vector<std::optional<ProcessMark>>& processes,
    const std::function<std::string(const std::string&)>& get) {
  for (int other = 0; other < size; ++other) {
    const auto r = static_cast<std::size_t>(other);
    if (!processes[r] || !processes[r]->is_elsewhere()) continue;
    if (!listens_) {
      listens_ = true;
      store_->set(key("line", rank), bytes_of(Lifeline::address()));
    }
    // Under the lock only this thread writes, so it may read without.
    if (!looks_after(other) || lines_[r]) continue;
    const std::string address = get(key("line", other));
    auto line = address.empty() ? nullptr : Lifeline::to(address, kFirstAnswer);
    const std::lock_guard lock(mutex_);
    lines_[r] = std::move(line);
  }
}

void GroupRecord::exchange_histories() {
  for (;;) {
    int64_t asked = 0;
    std::string mine;
    Histories read(static_cast<std::size_t>(size));
    std::vector<std::optional<ProcessMark>> processes;
    {
      const std::lock_guard lock(mutex_);
      asked = looks_asked_;
      mine = history_.encode();
      processes = processes_;
    }
    // Until this is over: the rank that serves it would cut the others off.
    const auto shared_store = shared_store_.lock();
    try {
      if (!store_.defined() && shared_store.defined()) {
        store_ = own_connection(shared_store);
      }
      if (store_.defined()) {
        if (mine != published_) {
          store_->set(key("calls", rank), bytes_of(mine));
          published_ = mine;
        }
        const auto get = [&](const std::string& name) {
          std::string text;
          if (!store_->check({name})) return text;
          const std::vector<uint8_t> bytes = store_->get(name);
          text.assign(bytes.begin(), bytes.end());
          return text;
        };
        for (int other = 0; other < size; ++other) {
          if (other == rank) continue;
          const auto r = static_cast<std::size_t>(other);
          if (const std::string text = get(key("calls", other)); !text.empty())
            read[r] = CallHistory::decode(text);
          if (!processes[r]) {
            processes[r] = ProcessMark::decode(get(key("process", other)));
          }
        }
        hold_lines(processes, get);
      }
    } catch (const std::exception&) {
      // The store went with the rank that served it; the backend, or the
      // process marks that we have, will tell.
    }
    const std::lock_guard lock(mutex_);
    for (std::size_t r = 0; r < read.size(); ++r) {
      if (read[r]) others_[r] = std::move(read[r]);
    }
    processes_ = std::move(processes);
    looks_done_ = asked;
    looking_ = looks_asked_ > asked;
    looked_.notify_all();
    if (!looking_) return;
  }
}

}  // namespace longspan
