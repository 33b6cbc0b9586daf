#include "longspan/comm/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <cstdlib>
#include <unordered_map>

#include "longspan/comm/detail/gloo_groups.h"
#include "longspan/comm/detail/group_record.h"
#include "longspan/comm/detail/launch.h"
#include "longspan/core/detail/check.h"

namespace longspan {

namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Null when there is none.
ProcessGroup registered(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

/// The name under which operators find this group; registers it when c10d does
/// not know it by its own.
std::string registered_name(const ProcessGroup& process_group) {
  std::string name;
  try {
    name = process_group->getGroupName();
  } catch (const std::exception&) {  // no backend that could hold a name
  }
  if (!name.empty() && registered(name) == process_group) return name;
  if (process_group->getSize() == 1) return "";
  static std::atomic<int64_t> made = 0;
  name = join("longspan/group/", made++);
  c10d::register_process_group(name, process_group);
  return name;
}

using Record = std::shared_ptr<GroupRecord>;

std::mutex records_mutex;

std::unordered_map<c10d::ProcessGroup*, Record>& records() {
  // Never destroyed: groups may outlive static objects.
  static auto* const map = new std::unordered_map<c10d::ProcessGroup*, Record>;
  return *map;
}

/// The record of a process group, made on first sight.
Record record_of(const ProcessGroup& process_group) {
  std::vector<Record> gone;  // let go of after the lock
  const std::lock_guard lock(records_mutex);
  auto& map = records();
  if (const auto it = map.find(process_group.get()); it != map.end()) {
    return it->second;
  }
  for (auto it = map.begin(); it != map.end();) {
    if (!it->second->process_group.expired()) {
      ++it;
      continue;
    }
    gone.push_back(std::move(it->second));
    it = map.erase(it);
  }
  auto record = std::make_shared<GroupRecord>(process_group,
                                              registered_name(process_group));
  map.emplace(process_group.get(), record);
  return record;
}

/// Null when it is gone, and for solo.
ProcessGroup alive(const Record& record) {
  return record ? record->process_group.lock() : ProcessGroup();
}

void check_alive(const ProcessGroup& process_group, const std::string& name) {
  check(process_group.defined(), "Group: no process group named '", name,
        "' is alive; keep it, and destroy it only after the last use of the "
        "group");
}

std::optional<std::string> variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

}  // namespace

// Here, because the header does not know what a process group is.
Group::Group() = default;
Group::Group(const Group&) = default;
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(const Group&) = default;
Group& Group::operator=(Group&&) noexcept = default;
Group::~Group() = default;

Group Group::solo() {
  return {};
}

Group Group::of(const ProcessGroup& process_group, Timeout timeout) {
  check(process_group.defined(),
        "Group: no process group; for one rank take Group::solo()");
  Group group;
  group.rank_ = process_group->getRank();
  group.size_ = process_group->getSize();
  check(group.rank_ >= 0 && group.rank_ < group.size_, "Group: rank ",
        group.rank_, " of ", group.size_,
        "; this process is no member of the group");
  group.record_ = record_of(process_group);
  group.name_ = group.record_->name;
  if (timeout) group.set_timeout(*timeout);
  return group;
}

Group Group::owning(ProcessGroup process_group) {
  Group group = of(process_group);
  group.owned_ = std::move(process_group);
  return group;
}

Group Group::named(const std::string& name) {
  if (name.empty()) return solo();
  const ProcessGroup process_group = registered(name);
  check_alive(process_group, name);
  return of(process_group);
}

Group Group::from_environment(Timeout timeout) {
  const std::optional<Launch> launch = launch_from(variable);
  if (!launch || launch->size == 1) return solo();
  static std::atomic<int64_t> made = 0;
  const std::string name = join("longspan/environment/", made++);
  // After a restart the store of torchrun's agent still holds the old keys.
  const std::string attempt =
      variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  GlooGroup plan = {.place = meet_at(*launch, join(name, "/attempt/", attempt)),
                    .rank = launch->rank,
                    .size = launch->size,
                    .name = name,
                    .network = Network::default_interface};
  if (timeout) plan.timeout = *timeout;
  Group group = make_gloo_group(plan);
  if (timeout) group.set_timeout(*timeout);
  return group;
}

std::chrono::milliseconds Group::timeout() const {
  if (record_ && record_->timeout > 0) {
    return std::chrono::milliseconds(record_->timeout.load());
  }
  std::chrono::milliseconds timeout = kProcessGroupDefaultTimeout;
  const ProcessGroup process_group = alive(record_);
  if (process_group.defined()) {
    try {
      const auto kinds = process_group->getDeviceTypes();
      const bool has_cpu =
          std::ranges::any_of(kinds, [](at::Device d) { return d.is_cpu(); });
      const auto backend = has_cpu
                               ? process_group->getBackend(c10::DeviceType::CPU)
                               : process_group->getDefaultBackend();
      timeout = backend->getBackendOptions()->timeout;
    } catch (const c10::Error&) {  // a backend without options has the default
    }
  }
  return timeout;
}

void Group::set_timeout(std::chrono::milliseconds timeout) const {
  check(timeout.count() > 0, "Group: a timeout of ", timeout.count(),
        " ms; expected more than none");
  if (!record_) return;
  record_->timeout = timeout.count();
  const ProcessGroup process_group = alive(record_);
  if (!process_group.defined()) return;
  for (const at::Device device : process_group->getDeviceTypes()) {
    try {
      process_group->getBackend(device.type())->setTimeout(timeout);
    } catch (const c10::Error&) {  // a backend without deadlines of its own
    }
  }
}

int64_t Group::sent_bytes() const {
  return record_ ? record_->sent_bytes.load() : 0;
}

std::chrono::nanoseconds Group::waited() const {
  return std::chrono::nanoseconds(record_ ? record_->waited.load() : 0);
}

std::string Group::to_string() const {
  if (!record_) return "rank 0 of 1 (solo)";
  const ProcessGroup process_group = alive(record_);
  return join(
      "rank ", rank_, " of ", size_, " (",
      process_group.defined() ? process_group->getBackendName() : "destroyed",
      ")");
}

ProcessGroup Group::process_group() const {
  ProcessGroup process_group = alive(record_);
  if (record_) check_alive(process_group, name_);
  return process_group;
}

}  // namespace longspan
