#include "longspan/comm/detail/backends.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "longspan/comm/detail/group_record.h"
#include "longspan/comm/disagreement.h"
#include "longspan/comm/lost_peer.h"
#include "longspan/core/detail/check.h"

namespace longspan {

/// How tensors of a device travel through a group.
struct Route {
  c10::intrusive_ptr<c10d::Backend> backend;
  bool is_gloo = false;
  bool coalesces = false;  // point to point goes in one batch (NCCL)
  bool through_host = false;
};

namespace {

bool has(const c10d::ProcessGroup& process_group, at::DeviceType type) {
  for (const at::Device device : process_group.getDeviceTypes()) {
    if (device.type() == type) return true;
  }
  return false;
}

Route route_for(c10d::ProcessGroup& process_group, at::Device device,
                const std::string& purpose) {
  const auto is_gloo = [](const c10d::Backend& backend) {
    return backend.getBackendName() == "gloo";
  };
  Route route;
  if (has(process_group, device.type())) {
    route.backend = process_group.getBackend(device.type());
    route.is_gloo = is_gloo(*route.backend);
    route.through_host = route.is_gloo && !device.is_cpu();
    route.coalesces = route.backend->supportsCoalescing();
    return route;
  }
  check(has(process_group, at::kCPU), purpose, ": the group's backend (",
        process_group.getBackendName(), ") does not move tensors of ",
        device.str(), "; make the group with one that does, such as ",
        "\"cpu:gloo,cuda:nccl\"");
  route.backend = process_group.getBackend(at::kCPU);
  route.is_gloo = is_gloo(*route.backend);
  route.through_host = true;
  return route;
}

/// Everything posted during its lifetime goes out as one batch.
class Coalesced {
 public:
  explicit Coalesced(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)) {
    backend_->startCoalescing();
  }
  Coalesced(const Coalesced&) = delete;
  Coalesced& operator=(const Coalesced&) = delete;
  ~Coalesced() {
    if (!backend_.defined()) return;
    try {
      backend_->endCoalescing();
    } catch (...) {  // the error that brought us here says more
    }
  }

  c10::intrusive_ptr<c10d::Work> end() {
    return std::exchange(backend_, {})->endCoalescing();
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

/// throw_lost_peer, once we know who is to blame.
[[noreturn]] void throw_blamed(const Group& group, const std::string& purpose,
                               int peer,
                               std::optional<std::chrono::milliseconds> time,
                               const std::string& why) {
  const WaitEnded known = group.record()->blame(peer, why);
  throw_lost_peer(group, purpose, known.peer, time, known.what());
}

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout), start_(std::chrono::steady_clock::now()) {}

  std::chrono::milliseconds passed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - start_);
  }
  /// At least 1 ms: c10d takes 0 for its own default.
  std::chrono::milliseconds left() const {
    return std::max(timeout_ - passed(), std::chrono::milliseconds(1));
  }

 private:
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

bool has_backend(const Group& group, at::DeviceType type) {
  return has(*group.process_group(), type);
}

void connect_once(const Group& group, at::Device device,
                  const std::string& purpose) {
  if (device.is_cpu() || group.record()->connected) return;
  const auto process_group = group.process_group();
  if (!has(*process_group, device.type())) return;
  const auto backend = process_group->getBackend(device.type());
  if (!backend->supportsCoalescing()) return;
  std::vector<at::Tensor> here = {at::ones({1}, at::TensorOptions(device))};
  try {
    backend->allreduce(here)->wait();
  } catch (const std::exception& error) {
    throw_lost_peer(group, purpose, -1, {}, error.what());
  }
  group.record()->connected = true;
}

struct Post::State {
  struct Posted {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;  // -1: several
  };

  Group group;
  std::string purpose;
  c10::intrusive_ptr<c10d::ProcessGroup> in_use;
  Route route;
  std::vector<Posted> posted = {};
  std::vector<at::Tensor> kept = {};

  void abandon() {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (Posted& each : posted) works.push_back(std::move(each.work));
    posted.clear();
    if (!works.empty()) group.record()->abandon(std::move(works));
  }
};

namespace {

/// Adds the nanoseconds of a block to a sum.
class WaitClock {
 public:
  explicit WaitClock(std::atomic<int64_t>& sum) : sum_(sum) {}
  WaitClock(const WaitClock&) = delete;
  WaitClock& operator=(const WaitClock&) = delete;
  ~WaitClock() {
    const auto passed = std::chrono::steady_clock::now() - begin_;
    sum_ += std::chrono::nanoseconds(passed).count();
  }

 private:
  std::atomic<int64_t>& sum_;
  std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
};

}  // namespace

Post::Post(const Group& group, at::Device device, std::string purpose) {
  auto process_group = group.process_group();
  Route route = route_for(*process_group, device, purpose);
  state_ = std::make_unique<State>(State{.group = group,
                                         .purpose = std::move(purpose),
                                         .in_use = std::move(process_group),
                                         .route = std::move(route)});
}

Post::Post(Post&&) noexcept = default;
Post::~Post() = default;

bool Post::is_gloo() const {
  return state_->route.is_gloo;
}

bool Post::through_host() const {
  return state_->route.through_host;
}

void Post::start(const std::vector<Message>& sends,
                 const std::vector<Message>& receives) {
  State& state = *state_;
  for (const Message& message : sends) {
    state.group.record()->sent_bytes +=
        static_cast<int64_t>(message.tensor.nbytes());
  }
  const auto keep = [&](c10::intrusive_ptr<c10d::Work> work, int peer) {
    if (work.defined()) state.posted.push_back({std::move(work), peer});
  };
  c10d::Backend& backend = *state.route.backend;
  int peer = -1;
  try {
    // Receives first: data that finds its buffer waiting is not kept aside.
    std::optional<Coalesced> coalesced;
    if (state.route.coalesces) coalesced.emplace(state.route.backend);
    for (const Message& message : receives) {
      peer = message.peer;
      std::vector<at::Tensor> tensors = {message.tensor};
      state.kept.push_back(message.tensor);
      keep(backend.recv(tensors, peer, message.tag), peer);
    }
    for (const Message& message : sends) {
      peer = message.peer;
      std::vector<at::Tensor> tensors = {message.tensor};
      state.kept.push_back(message.tensor);
      keep(backend.send(tensors, peer, message.tag), peer);
    }
    if (coalesced) {
      // One piece of work stands for all; those of the parts are not needed.
      state.posted.clear();
      peer = -1;
      keep(coalesced->end(), peer);
    }
  } catch (const std::exception& error) {
    state.abandon();
    throw_blamed(state.group, state.purpose, peer, {}, error.what());
  }
}

void Post::finish() {
  State& state = *state_;
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) range.before(join("wait, ", state.purpose));
  const WaitClock clock(state.group.record()->waited);
  const Deadline deadline(state.group.timeout());
  while (!state.posted.empty()) {
    // Taken out only once done, so that abandon() keeps it on an error.
    const State::Posted next = state.posted.back();
    try {
      if (state.route.is_gloo) {
        state.group.record()->wait(next.work, deadline.left());
      } else if (!next.work->wait()) {
        throw std::runtime_error("the work was aborted");
      }
    } catch (const Disagreement&) {
      state.abandon();
      throw;
    } catch (const WaitStopped& stopped) {
      state.abandon();
      std::rethrow_exception(stopped.reason);
    } catch (const WaitEnded& ended) {
      state.abandon();
      throw_blamed(state.group, state.purpose,
                   ended.peer < 0 ? next.peer : ended.peer, deadline.passed(),
                   ended.what());
    } catch (const std::exception& error) {
      state.abandon();
      throw_blamed(state.group, state.purpose, next.peer, deadline.passed(),
                   error.what());
    }
    state.posted.pop_back();
  }
}

void Post::abandon() {
  state_->abandon();
}

bool gather_at_once(const at::Tensor& source, const at::Tensor& target,
                    const Group& group, const std::string& purpose) {
  const auto process_group = group.process_group();
  const Route route = route_for(*process_group, source.device(), purpose);
  if (route.is_gloo || route.through_host || source.numel() == 0) return false;
  at::Tensor from = source, to = target;
  try {
    route.backend->_allgather_base(to, from)->wait();
  } catch (const std::exception& error) {
    throw_lost_peer(group, purpose, -1, {}, error.what());
  }
  group.record()->sent_bytes +=
      static_cast<int64_t>(source.nbytes()) * (group.size() - 1);
  return true;
}

void interrupt(const Group& group, const std::string& why) {
  if (group.record()) group.record()->interrupt(why);
}

}  // namespace longspan
