#include "longspan/ops/output_delta.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/kernels/common/device.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

at::Tensor by_kernel(const at::Tensor& out, const at::Tensor& dout) {
  at::Tensor delta = at::empty(out.sizes().slice(0, 3), sums_like(out));
  const at::Tensor a = with_aligned_rows(out), b = with_aligned_rows(dout);
  hopper::output_delta({.type = *element_type(out.scalar_type()),
                        .rows = out.size(0),
                        .queries = out.size(1),
                        .heads = out.size(2),
                        .value_dim = static_cast<int>(out.size(3)),
                        .out = array_of<const void*>(a),
                        .dout = array_of<const void*>(b),
                        .delta = array_of<float*>(delta)},
                       current_stream(out));
  return delta;
}

}  // namespace

at::Tensor output_delta(const at::Tensor& out, const at::Tensor& dout,
                        const at::Tensor& lse) {
  const c10::OptionalDeviceGuard guard(out.device());
  constexpr int kHopper = 90;
  const auto sums = accumulation_type(out.scalar_type());
  const at::ScalarType type = out.scalar_type();
  const bool has_kernel = out.is_cuda() && dout.scalar_type() == type &&
                          (type == at::kBFloat16 || type == at::kHalf) &&
                          out.size(-1) % 8 == 0 &&
                          device_generation() == kHopper;
  at::Tensor delta = has_kernel ? by_kernel(out, dout)
                                : (out.to(sums) * dout.to(sums)).sum(-1);
  return delta.masked_fill_(at::isneginf(lse), 0);
}

}  // namespace longspan
