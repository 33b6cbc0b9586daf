#include "longspan/comm/backends.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/comm/exchange.h"
#include "longspan/comm/group_record.h"
#include "longspan/core/check.h"

namespace longspan {

namespace {

bool is_gloo(const c10d::Backend& backend) {
  return backend.getBackendName() == "gloo";
}

/// The first line without the trace that c10 adds, nor a final full stop.
std::string_view essence(std::string_view cause) {
  cause = cause.substr(0, cause.find('\n'));
  while (!cause.empty() && (cause.back() == '.' || cause.back() == ' ')) {
    cause.remove_suffix(1);
  }
  return cause.empty() ? "no reason given" : cause;
}

}  // namespace

bool has_backend(const c10d::ProcessGroup& process_group, at::DeviceType type) {
  for (const at::Device device : process_group.getDeviceTypes()) {
    if (device.type() == type) return true;
  }
  return false;
}

Route route_for(const Group& group, at::Device device,
                const std::string& purpose) {
  const auto process_group = group.process_group();
  const auto has = [&](at::DeviceType type) {
    return has_backend(*process_group, type);
  };
  Route route;
  if (has(device.type())) {
    route.backend = process_group->getBackend(device.type());
    route.is_gloo = is_gloo(*route.backend);
    route.through_host = route.is_gloo && !device.is_cpu();
    route.coalesces = route.backend->supportsCoalescing();
    return route;
  }
  check(has(at::kCPU), purpose, ": the group's backend (",
        process_group->getBackendName(), ") does not move tensors of ",
        device.str(), "; make the group with one that does, such as ",
        "\"cpu:gloo,cuda:nccl\"");
  route.backend = process_group->getBackend(at::kCPU);
  route.is_gloo = is_gloo(*route.backend);
  route.through_host = true;
  return route;
}

at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(
      tensor.sizes(),
      tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()));
}

void connect_once(const Group& group, at::Device device,
                  const std::string& purpose) {
  if (device.is_cpu() || group.record()->connected) return;
  const auto process_group = group.process_group();
  if (!has_backend(*process_group, device.type())) return;
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

Coalesced::Coalesced(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {
  backend_->startCoalescing();
}

c10::intrusive_ptr<c10d::Work> Coalesced::end() {
  return std::exchange(backend_, {})->endCoalescing();
}

Coalesced::~Coalesced() {
  if (!backend_.defined()) return;
  try {
    backend_->endCoalescing();
  } catch (...) {  // the error that brought us here says more
  }
}

std::chrono::milliseconds Deadline::passed() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start_);
}

std::chrono::milliseconds Deadline::left() const {
  return std::max(timeout_ - passed(), std::chrono::milliseconds(1));
}

void throw_lost_peer(const Group& group, const std::string& purpose, int peer,
                     std::optional<std::chrono::milliseconds> time,
                     std::string_view cause) {
  const std::string who =
      peer < 0 ? std::string("the other ranks") : join("rank ", peer);
  const std::string waited =
      time ? join(" waited ", static_cast<double>(time->count() / 100) / 10,
                  " s for ")
           : std::string(" could not reach ");
  throw LostPeer(join(purpose, ": rank ", group.rank(), waited, who, ": ",
                      essence(cause), "; look at the log of ", who,
                      ", or raise the group's timeout"));
}

}  // namespace longspan
