#include "longspan/comm/detail/gloo_groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <csignal>
#include <cstdlib>

#include "longspan/comm/detail/group_record.h"
#include "longspan/core/detail/check.h"

namespace longspan {

struct MeetingPlace {
  c10::intrusive_ptr<c10d::Store> store;
};

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

std::shared_ptr<MeetingPlace> meet_here(std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(timeout);
  return std::make_shared<MeetingPlace>(MeetingPlace{std::move(store)});
}

std::shared_ptr<MeetingPlace> meet_at(const Launch& launch,
                                      const std::string& prefix) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launch.store_exists;
  options.numWorkers = static_cast<std::size_t>(launch.size);
  options.waitWorkers = false;
  options.multiTenant = true;
  return std::make_shared<MeetingPlace>(
      MeetingPlace{c10::make_intrusive<c10d::PrefixStore>(
          prefix,
          c10::make_intrusive<c10d::TCPStore>(launch.address, options))});
}

Group make_gloo_group(const GlooGroup& group) {
  survive_broken_pipes();
  const auto options = c10d::ProcessGroupGloo::Options::create(group.timeout);
  options->devices.push_back(device_of(group.network));
  options->group_name = group.name;
  const auto& store = group.place->store;
  const auto backend =
      c10::make_intrusive<Gloo>(store, group.rank, group.size, options);
  auto process_group =
      c10::make_intrusive<c10d::ProcessGroup>(store, group.rank, group.size);
  process_group->setBackend(c10::DeviceType::CPU,
                            c10d::ProcessGroup::BackendType::GLOO, backend);
  process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  process_group->setGroupName(group.name);
  c10d::register_process_group(group.name, process_group);
  return Group::owning(std::move(process_group));
}

void close_gloo_group(const Group& group) {
  const auto process_group = group.process_group();
  c10d::unregister_process_group(group.name());
  auto* const gloo = dynamic_cast<Gloo*>(
      process_group->getBackend(c10::DeviceType::CPU).get());
  promise(gloo != nullptr, "close_gloo_group: not made by make_gloo_group");
  gloo->close();
  group.record()->forget_abandoned();
}

std::string why_no_gloo() {
  return "";
}

}  // namespace longspan
