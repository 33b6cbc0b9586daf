#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "longspan/comm/group.h"

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
  Transfer& operator=(Transfer&&) noexcept;
  ~Transfer();

  /// Returns when everything was sent and received (on CUDA: when the current
  /// stream may use it). Throws std::runtime_error that names rank, peer and
  /// purpose when the group's timeout expires or a peer is gone.
  void wait();

 private:
  friend Transfer start_exchange(const Group&, std::vector<Parcel>,
                                 std::vector<Parcel>, std::string);
  struct State;
  std::unique_ptr<State> state_;
};

/// Starts sending and receiving point to point, all at once and without an
/// order between peers. The parcels between two ranks match in the order in
/// which both list them; empty ones are left out on both sides. Every rank of
/// the group must call it in the same order (its lists may be empty).
/// `purpose` is for messages: "ring attention forward, hop 2 of 4".
Transfer start_exchange(const Group& group, std::vector<Parcel> sends,
                        std::vector<Parcel> receives, std::string purpose);

}  // namespace longspan
