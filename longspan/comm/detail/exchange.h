#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "longspan/comm/group.h"
#include "longspan/comm/lost_peer.h"

namespace longspan {

/// A contiguous tensor that goes to, or comes from, another rank.
struct Parcel {
  int peer = 0;
  at::Tensor tensor;
};

/// Parcels under way. The tensors must not be touched before wait().
class Transfer {
 public:
  /// Nothing under way.
  Transfer();
  Transfer(Transfer&&) noexcept;
  /// First waits for the parcels that this held before; ignores their errors.
  Transfer& operator=(Transfer&&) noexcept;
  /// Waits as well, unless an exception is unwinding; then the tensors are kept
  /// until the backend is done with them.
  ~Transfer();

  /// Returns when everything was sent and received (on CUDA: when the current
  /// stream may use it). Throws LostPeer, which names rank, peer and purpose,
  /// when the group's timeout expires or a peer is gone.
  void wait();

 private:
  friend Transfer start_exchange(const Group&, std::vector<Parcel>,
                                 std::vector<Parcel>, std::string, uint64_t,
                                 std::optional<at::Device>);
  void drop() noexcept;
  struct State;
  std::unique_ptr<State> state_;
};

/// Starts sending and receiving point to point, all at once and without an
/// order between peers. The parcels between two ranks match in the order in
/// which both list them; empty ones are left out on both sides. Every rank of
/// the group must call it in the same order (its lists may be empty). Over gloo
/// a parcel whose sizes differ is never delivered: both ranks time out.
/// `purpose` is for messages: "ring attention forward, keys, hop 2 of 3".
/// `common` is a number that must be the same on both sides, such as the hash
/// of a plan: over gloo, parcels that differ in it are never delivered either.
///
/// Tensors are on one device; `device` says which where the lists are empty, so
/// that a rank without parcels connects as the others do. Where the backend
/// cannot move tensors of that device (CUDA over gloo), they go through copies
/// in host memory.
Transfer start_exchange(const Group& group, std::vector<Parcel> sends,
                        std::vector<Parcel> receives, std::string purpose,
                        uint64_t common = 0,
                        std::optional<at::Device> device = {});

}  // namespace longspan
