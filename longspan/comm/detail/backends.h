#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "longspan/comm/group.h"

namespace longspan {

/// Whether a group moves tensors of a kind of device.
bool has_backend(const Group& group, at::DeviceType type);

/// Brings all ranks together before the first exchange where the backend
/// connects lazily and wants everyone there (NCCL). Every rank must call it.
void connect_once(const Group& group, at::Device device,
                  const std::string& purpose);

/// A contiguous tensor to or from a peer, under a tag that both sides know.
struct Message {
  int peer = 0;
  int tag = 0;
  at::Tensor tensor;
};

/// Messages of one device in the hands of a group's backend. Failures are
/// LostPeer.
class Post {
 public:
  /// Finds the backend; refuses where the group has none that would do.
  Post(const Group& group, at::Device device, std::string purpose);
  Post(Post&&) noexcept;
  ~Post();

  /// Waits block and take a deadline, and messages meet by their tags; other
  /// backends order them on a stream.
  bool is_gloo() const;

  /// Whether tensors must be in host memory.
  bool through_host() const;

  /// Hands all messages over, and keeps their memory until the backend is done.
  void start(const std::vector<Message>& sends,
             const std::vector<Message>& receives);

  /// Returns when everything was sent and received.
  void finish();

  /// Leaves the rest to the backend.
  void abandon();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The backend's own all-gather of equal parts, both sides contiguous: target
/// is the sources in the order of the ranks. False where nothing was done, as
/// with gloo, whose all-gather would not notice a peer that dies meanwhile.
bool gather_at_once(const at::Tensor& source, const at::Tensor& target,
                    const Group& group, const std::string& purpose);

/// Ends all waits of a group, now and later, with this reason.
void interrupt(const Group& group, const std::string& why);

}  // namespace longspan
