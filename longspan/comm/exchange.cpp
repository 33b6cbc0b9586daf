#include "longspan/comm/exchange.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "longspan/comm/backends.h"
#include "longspan/comm/group_record.h"
#include "longspan/core/check.h"

namespace longspan {

namespace {

/// Keeps apart from the tags of others who use the same group.
constexpr uint64_t kFirstTag = 0x15a000;

void check_parcels(const Group& group, const std::vector<Parcel>& parcels,
                   const char* list, const std::string& purpose,
                   std::optional<at::Device>& device) {
  for (std::size_t i = 0; i < parcels.size(); ++i) {
    const auto& [peer, tensor] = parcels[i];
    const auto refuse = [&](bool condition, const auto&... parts) {
      check(condition, purpose, ": ", list, "[", i, "] ", parts...);
    };
    refuse(tensor.defined(), "holds no tensor");
    refuse(peer >= 0 && peer < group.size(), "names rank ", peer,
           " of a group of ", group.size());
    refuse(peer != group.rank(), "names rank ", peer,
           " itself; copy what stays");
    refuse(tensor.is_contiguous(), "is not contiguous; take .contiguous()");
    if (!device) device = tensor.device();
    refuse(tensor.device() == *device, "is on ", tensor.device().str(),
           ", others on ", device->str(), "; keep them on one device");
  }
}

void drop_empty(std::vector<Parcel>& parcels) {
  std::erase_if(
      parcels, [](const Parcel& parcel) { return parcel.tensor.numel() == 0; });
}

int64_t bytes_of(const std::vector<Parcel>& parcels) {
  int64_t bytes = 0;
  for (const Parcel& parcel : parcels) {
    bytes += static_cast<int64_t>(parcel.tensor.nbytes());
  }
  return bytes;
}

/// Hands out tags: the n-th parcel between two ranks has the n-th tag.
class Tags {
 public:
  Tags(int ranks, bool with_size, uint64_t common)
      : next_(static_cast<std::size_t>(ranks)),
        with_size_(with_size),
        common_(common) {}

  /// gloo ends the process when more arrives than was asked for, and says
  /// nothing about less. With the size in the tag such parcels never meet, and
  /// the deadline tells.
  int next(const Parcel& parcel) {
    const int order = next_[static_cast<std::size_t>(parcel.peer)]++;
    if (!with_size_) return order;
    uint64_t bits = static_cast<uint64_t>(parcel.tensor.nbytes()) + kFirstTag;
    bits = (bits * 0x9e3779b97f4a7c15) ^ static_cast<uint64_t>(order) ^ common_;
    bits *= 0xd6e8feb86659fd93;
    return static_cast<int>(bits >> 33);
  }

 private:
  std::vector<int> next_;
  bool with_size_;
  uint64_t common_;
};

}  // namespace

struct Transfer::State {
  struct Posted {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;  // -1: several
  };
  struct Staged {
    at::Tensor target;
    at::Tensor host;
  };

  Group group;
  c10::intrusive_ptr<c10d::ProcessGroup> in_use;
  std::string purpose;
  Route route;
  std::vector<Posted> posted = {};
  std::vector<at::Tensor> kept = {};  // until the backend is done with them
  std::vector<Staged> staged = {};

  void stage(std::vector<Parcel>& sends, std::vector<Parcel>& receives) {
    for (Parcel& parcel : sends) {
      at::Tensor host = host_like(parcel.tensor);
      host.copy_(parcel.tensor);
      parcel.tensor = std::move(host);
    }
    for (Parcel& parcel : receives) {
      at::Tensor host = host_like(parcel.tensor);
      staged.push_back({std::exchange(parcel.tensor, host), host});
    }
  }

  void post(const std::vector<Parcel>& sends,
            const std::vector<Parcel>& receives, uint64_t common) {
    Tags send_tags(group.size(), route.is_gloo, common);
    Tags receive_tags(group.size(), route.is_gloo, common);
    const auto keep = [&](c10::intrusive_ptr<c10d::Work> work, int peer) {
      if (work.defined()) posted.push_back({std::move(work), peer});
    };
    int peer = -1;
    try {
      // Receives first: data that finds its buffer waiting is not kept aside.
      std::optional<Coalesced> coalesced;
      if (route.coalesces) coalesced.emplace(route.backend);
      for (const Parcel& parcel : receives) {
        peer = parcel.peer;
        std::vector<at::Tensor> tensors = {parcel.tensor};
        kept.push_back(parcel.tensor);
        keep(route.backend->recv(tensors, peer, receive_tags.next(parcel)),
             peer);
      }
      for (const Parcel& parcel : sends) {
        peer = parcel.peer;
        std::vector<at::Tensor> tensors = {parcel.tensor};
        kept.push_back(parcel.tensor);
        keep(route.backend->send(tensors, peer, send_tags.next(parcel)), peer);
      }
      if (coalesced) {
        // One piece of work stands for all; those of the parts are not needed.
        posted.clear();
        peer = -1;
        keep(coalesced->end(), peer);
      }
    } catch (const std::exception& error) {
      abandon();
      throw_lost_peer(group, purpose, peer, {}, error.what());
    }
  }

  void finish() {
    const Deadline deadline(group.timeout());
    while (!posted.empty()) {
      // Taken out only once done, so that abandon() keeps it on an error.
      const Posted next = posted.back();
      try {
        const bool done = route.is_gloo
                              ? group.record()->wait(next.work, deadline.left())
                              : next.work->wait();
        if (!done) throw std::runtime_error("the work was aborted");
      } catch (const std::exception& error) {
        abandon();
        throw_lost_peer(group, purpose, next.peer, deadline.passed(),
                        error.what());
      }
      posted.pop_back();
    }
    for (const auto& [target, host] : staged) {
      target.copy_(host, /*non_blocking=*/true);
    }
  }

  void abandon() {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (Posted& each : posted) works.push_back(std::move(each.work));
    posted.clear();
    if (!works.empty()) group.record()->abandon(std::move(works));
  }
};

Transfer::Transfer() = default;
Transfer::Transfer(Transfer&&) noexcept = default;

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  if (this != &other) {
    drop();
    state_ = std::move(other.state_);
  }
  return *this;
}

Transfer::~Transfer() {
  drop();
}

void Transfer::drop() noexcept {
  if (!state_) return;
  try {
    // Waiting for peers would hold back the exception that they wait for.
    // Backends with streams do not block here, and need the ordering.
    if (std::uncaught_exceptions() > 0 && state_->route.is_gloo) {
      state_->abandon();
    } else {
      state_->finish();
    }
  } catch (...) {  // wait() is there for those who want to know
  }
  state_.reset();
}

void Transfer::wait() {
  if (const auto state = std::move(state_)) state->finish();
}

Transfer start_exchange(const Group& group, std::vector<Parcel> sends,
                        std::vector<Parcel> receives, std::string purpose,
                        uint64_t common, std::optional<at::Device> device) {
  check_parcels(group, sends, "sends", purpose, device);
  check_parcels(group, receives, "receives", purpose, device);
  drop_empty(sends);
  drop_empty(receives);
  Transfer transfer;
  if (group.size() == 1) return transfer;
  if (device) connect_once(group, *device, purpose);
  if (sends.empty() && receives.empty()) return transfer;
  Route route = route_for(group, *device, purpose);
  transfer.state_ = std::make_unique<Transfer::State>(
      Transfer::State{.group = group,
                      .in_use = group.process_group(),
                      .purpose = std::move(purpose),
                      .route = std::move(route)});
  Transfer::State& state = *transfer.state_;
  group.record()->sent_bytes += bytes_of(sends);
  if (state.route.through_host) state.stage(sends, receives);
  state.post(sends, receives, common);
  return transfer;
}

}  // namespace longspan
