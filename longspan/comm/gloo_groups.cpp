#include "longspan/comm/gloo_groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>
#include <cstdlib>

#include "longspan/core/check.h"

namespace longspan {

namespace {

class Gloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void close() {
    for (const auto& context : contexts_) context->closeConnections();
  }
};

std::shared_ptr<gloo::transport::Device> device_of(Network network) {
  if (network == Network::loopback) {
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  }
  const char* const name = std::getenv("GLOO_SOCKET_IFNAME");
  return name != nullptr && *name != '\0'
             ? c10d::ProcessGroupGloo::createDeviceForInterface(name)
             : c10d::ProcessGroupGloo::createDefaultDevice();
}

/// gloo writes to sockets whose peer may be gone, which by default ends the
/// process; ignored, the write fails and gloo reports it.
void survive_broken_pipes() {
  static const bool done = [] {
    struct sigaction now = {};
    if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
      now.sa_handler = SIG_IGN;
      sigaction(SIGPIPE, &now, nullptr);
    }
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const GlooGroup& group) {
  survive_broken_pipes();
  const auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
  options->devices.push_back(device_of(group.network));
  options->group_name = group.name;
  const auto backend =
      c10::make_intrusive<Gloo>(group.store, group.rank, group.size, options);
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(
      group.store, group.rank, group.size);
  process_group->setBackend(c10::DeviceType::CPU,
                            c10d::ProcessGroup::BackendType::GLOO, backend);
  process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  process_group->setGroupName(group.name);
  c10d::register_process_group(group.name, process_group);
  return process_group;
}

void close_gloo_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    const std::string& name) {
  c10d::unregister_process_group(name);
  auto* const gloo = dynamic_cast<Gloo*>(
      process_group->getBackend(c10::DeviceType::CPU).get());
  promise(gloo != nullptr, "close_gloo_group: not made by make_gloo_group");
  gloo->close();
}

std::string why_no_gloo() {
  return "";
}

}  // namespace longspan
