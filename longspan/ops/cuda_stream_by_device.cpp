#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "longspan/ops/cuda_stream.h"

namespace longspan {

/// For builds beside a torch without CUDA: what they run beside later may have
/// it, and answers through what all devices have in common.
void* current_stream(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  return c10::impl::VirtualGuardImpl(device.type())
      .getStream(device)
      .native_handle();
}

}  // namespace longspan
