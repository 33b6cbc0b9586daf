#include "longspan/comm/detail/exchange.h"

#include <ATen/ATen.h>

#include <exception>
#include <utility>

#include "longspan/comm/detail/backends.h"
#include "longspan/comm/detail/call.h"
#include "longspan/core/detail/check.h"

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
    refuse(tensor.device() == *device, "is on ", tensor.device(),
           ", others on ", *device, "; keep them on one device");
  }
}

void drop_empty(std::vector<Parcel>& parcels) {
  std::erase_if(
      parcels, [](const Parcel& parcel) { return parcel.tensor.numel() == 0; });
}

/// Hands out tags: the n-th parcel between two ranks has the n-th tag.
class Tags {
 public:
  Tags(int ranks, bool with_size, uint64_t common)
      : next_(static_cast<std::size_t>(ranks)),
        with_size_(with_size),
        common_(common) {}

  /// gloo ends the process when more arrives than was asked for, and says
  /// nothing about less. With type, size and call in the tag such parcels never
  /// meet, and ranks that wait look at what the others do.
  int next(const Parcel& parcel) {
    const int order = next_[static_cast<std::size_t>(parcel.peer)]++;
    if (!with_size_) return order;
    uint64_t bits =
        (static_cast<uint64_t>(parcel.tensor.nbytes()) + kFirstTag) * 64 +
        static_cast<uint64_t>(parcel.tensor.scalar_type());
    bits = (bits * 0x9e3779b97f4a7c15) ^ static_cast<uint64_t>(order) ^ common_;
    bits *= 0xd6e8feb86659fd93;
    return static_cast<int>(bits >> 33);
  }

 private:
  std::vector<int> next_;
  bool with_size_;
  uint64_t common_;
};

std::vector<Message> tagged(const std::vector<Parcel>& parcels, Tags tags) {
  std::vector<Message> messages;
  for (const Parcel& parcel : parcels) {
    messages.push_back({parcel.peer, tags.next(parcel), parcel.tensor});
  }
  return messages;
}

/// An empty tensor of the same shape in host memory, pinned for CUDA.
at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(
      tensor.sizes(),
      tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()));
}

}  // namespace

struct Transfer::State {
  struct Staged {
    at::Tensor target;
    at::Tensor host;
  };

  Post post;
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

  void finish() {
    post.finish();
    for (const auto& [target, host] : staged) {
      target.copy_(host, /*non_blocking=*/true);
    }
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
    if (std::uncaught_exceptions() > 0 && state_->post.is_gloo()) {
      state_->post.abandon();
    } else {
      state_->finish();
    }
  } catch (...) {  // callers that want the error call wait()
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
  CallScope call(group, "exchange");
  call.begin([&] { return purpose; });
  if (device) connect_once(group, *device, purpose);
  if (sends.empty() && receives.empty()) return transfer;
  transfer.state_ = std::make_unique<Transfer::State>(
      Transfer::State{.post = Post(group, *device, std::move(purpose))});
  Transfer::State& state = *transfer.state_;
  if (state.post.through_host()) state.stage(sends, receives);
  const bool with_size = state.post.is_gloo();
  common ^= call_seed(group);
  state.post.start(tagged(sends, Tags(group.size(), with_size, common)),
                   tagged(receives, Tags(group.size(), with_size, common)));
  return transfer;
}

}  // namespace longspan
