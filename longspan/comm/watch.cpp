#include "longspan/comm/detail/watch.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// State and start of a process; nothing where there is none.
struct ProcessState {
  char state = 0;
  int64_t started = 0;
};

std::optional<ProcessState> state_of(int64_t pid) {
  const std::string line = first_line(join("/proc/", pid, "/stat"));
  // The name, in brackets, may hold anything.
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessState found;
  fields >> found.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> found.started;
  return found;
}

std::string this_machine() {
  char space[PATH_MAX] = {};
  const auto size = readlink("/proc/self/ns/pid", space, sizeof(space) - 1);
  return join(first_line("/proc/sys/kernel/random/boot_id"), " ",
              size > 0 ? space : "");
}

/// How long a thread without work stays.
constexpr std::chrono::seconds kIdle{2};

}  // namespace

ProcessMark ProcessMark::mine() {
  ProcessMark mark;
  mark.machine = this_machine();
  mark.pid = getpid();
  const auto state = state_of(mark.pid);
  mark.started = state ? state->started : 0;
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  mark.host = host;
  return mark;
}

std::string ProcessMark::encode() const {
  return join(pid, "\n", started, "\n", machine, "\n", host);
}

std::optional<ProcessMark> ProcessMark::decode(std::string_view text) {
  std::istringstream fields{std::string(text)};
  ProcessMark mark;
  fields >> mark.pid >> mark.started;
  fields.ignore();
  std::getline(fields, mark.machine);
  std::getline(fields, mark.host);
  if (!fields || mark.pid <= 0) return std::nullopt;
  return mark;
}

bool ProcessMark::is_elsewhere() const {
  static const std::string here = this_machine();
  return machine != here;
}

bool ProcessMark::is_gone() const {
  // Where /proc does not show this process itself it says nothing of others.
  if (is_elsewhere() || started == 0 || !state_of(getpid())) return false;
  const auto now = state_of(pid);
  return !now || now->started != started || now->state == 'Z' ||
         now->state == 'X';
}

std::string ProcessMark::to_string() const {
  return join("process ", pid, " on ", host);
}

struct Alarms::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Alarm*> alarms;
  bool runs = false;
  bool dozes = false;  // whether anybody has to wake the thread
};

Alarms::State& Alarms::state() {
  static auto* const shared = new State;  // threads may outlive statics
  return *shared;
}

void Alarms::run() {
  State& state = Alarms::state();
  std::unique_lock lock(state.mutex);
  for (;;) {
    if (state.alarms.empty()) {
      state.dozes = true;
      const bool woken = state.changed.wait_for(
          lock, kIdle, [&] { return !state.alarms.empty(); });
      state.dozes = false;
      if (!woken) {
        state.runs = false;
        return;
      }
    }
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
    const auto now = std::chrono::steady_clock::now();
    for (Alarm* const alarm : state.alarms) {
      if (now - alarm->since_ >= kPause / 2) alarm->wake_();
    }
  }
}

Alarms::Alarm::Alarm(std::function<void()> wake)
    : wake_(std::move(wake)), since_(std::chrono::steady_clock::now()) {
  State& state = Alarms::state();
  const std::lock_guard lock(state.mutex);
  state.alarms.push_back(this);
  if (!state.runs) {
    state.runs = true;
    std::thread(Alarms::run).detach();
  } else if (state.dozes) {
    state.changed.notify_one();
  }
}

Alarms::Alarm::~Alarm() {
  State& state = Alarms::state();
  const std::lock_guard lock(state.mutex);
  std::erase(state.alarms, this);
}

namespace {

struct Beside {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> errands;
  bool runs = false;
};

Beside& beside() {
  static auto* const shared = new Beside;
  return *shared;
}

void run_errands() {
  Beside& all = beside();
  std::unique_lock lock(all.mutex);
  while (
      all.changed.wait_for(lock, kIdle, [&] { return !all.errands.empty(); })) {
    std::function<void()> errand = std::move(all.errands.front());
    all.errands.pop_front();
    lock.unlock();
    errand();
    errand = nullptr;
    lock.lock();
  }
  all.runs = false;
}

std::atomic<void (*)()> wait_hook = nullptr;

}  // namespace

void run_beside(std::function<void()> errand) {
  Beside& all = beside();
  const std::lock_guard lock(all.mutex);
  all.errands.push_back(std::move(errand));
  if (!all.runs) {
    all.runs = true;
    std::thread(run_errands).detach();
  } else {
    all.changed.notify_one();
  }
}

void set_wait_hook(void (*hook)()) {
  wait_hook = hook;
}

void call_wait_hook() {
  if (void (*const hook)() = wait_hook) hook();
}

}  // namespace longspan
