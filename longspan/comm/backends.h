#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "longspan/comm/group.h"

namespace longspan {

/// How tensors of a device travel through a group.
struct Route {
  c10::intrusive_ptr<c10d::Backend> backend;
  bool is_gloo = false;       ///< waits block, and take a deadline
  bool coalesces = false;     ///< point to point goes in one batch (NCCL)
  bool through_host = false;  ///< tensors are copied to host memory first
};
Route route_for(const Group& group, at::Device device,
                const std::string& purpose);

/// Whether a group moves tensors of a kind of device.
bool has_backend(const c10d::ProcessGroup& process_group, at::DeviceType type);

/// An empty tensor of the same shape in host memory, pinned for CUDA.
at::Tensor host_like(const at::Tensor& tensor);

/// Brings all ranks together before the first exchange where the backend
/// connects lazily and wants everyone there (NCCL). Every rank must call it.
void connect_once(const Group& group, at::Device device,
                  const std::string& purpose);

/// Everything posted while it lives goes out as one batch.
class Coalesced {
 public:
  explicit Coalesced(c10::intrusive_ptr<c10d::Backend> backend);
  Coalesced(const Coalesced&) = delete;
  Coalesced& operator=(const Coalesced&) = delete;
  ~Coalesced();
  c10::intrusive_ptr<c10d::Work> end();

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout), start_(std::chrono::steady_clock::now()) {}
  std::chrono::milliseconds passed() const;
  /// At least 1 ms: c10d takes 0 for its own default.
  std::chrono::milliseconds left() const;

 private:
  std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point start_;
};

/// Throws LostPeer: "<purpose>: rank 1 waited 5 s for rank 0: <cause>; ...".
/// peer -1 stands for the whole group.
[[noreturn]] void throw_lost_peer(const Group& group,
                                  const std::string& purpose, int peer,
                                  std::optional<std::chrono::milliseconds> time,
                                  std::string_view cause);

}  // namespace longspan
