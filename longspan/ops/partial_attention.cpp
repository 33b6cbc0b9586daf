#include "longspan/ops/partial_attention.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "longspan/core/check.h"
#include "longspan/kernels/cuda/merge_partials.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

/// exp(part - whole), 0 where part is -inf: then whole may be -inf too.
at::Tensor weight(const at::Tensor& part, const at::Tensor& whole) {
  return at::where(at::isneginf(part), at::zeros({}, part.options()),
                   (part - whole).exp());
}

void check_alike(const PartialAttention& a, const PartialAttention& b) {
  check(a.out.sizes() == b.out.sizes() && a.lse.sizes() == b.lse.sizes(),
        "PartialAttention: ", describe(a.out), " with lse ", describe(a.lse),
        " does not merge with ", describe(b.out), " with lse ",
        describe(b.lse));
  check(a.out.dim() == a.lse.dim() + 1 &&
            a.out.sizes().slice(0, a.lse.dim()) == a.lse.sizes(),
        "PartialAttention: lse is ", describe(a.lse), " but out ",
        describe(a.out), "; expected one entry for each row of channels");
}

/// By the kernel that does it in one go, where it can.
bool merged_on_device(PartialAttention& running, const PartialAttention& part) {
  const auto type = element_type(part.out.scalar_type());
  const auto channels_lie_together = [](const at::Tensor& out) {
    return out.size(3) <= 1 || out.stride(3) == 1;
  };
  const c10::OptionalDeviceGuard guard(running.out.device());
  if (!running.out.is_cuda() || running.out.dim() != 4 || !type ||
      *type == ElementType::float64 ||
      running.out.scalar_type() != at::kFloat ||
      running.lse.scalar_type() != at::kFloat ||
      part.lse.scalar_type() != at::kFloat ||
      !channels_lie_together(running.out) || !channels_lie_together(part.out) ||
      why_not_merge_partials()) {
    return false;
  }
  merge_partials({.rows = part.out.size(0),
                  .tokens = part.out.size(1),
                  .heads = part.out.size(2),
                  .channels = static_cast<int>(part.out.size(3)),
                  .out = array_of<float*>(running.out),
                  .lse = array_of<float*>(running.lse),
                  .part_type = *type,
                  .part_out = array_of<const void*>(part.out),
                  .part_lse = array_of<const float*>(part.lse)},
                 current_stream(running.out));
  return true;
}

}  // namespace

at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

PartialAttention PartialAttention::nothing(at::IntArrayRef sizes,
                                           int64_t channels,
                                           const at::TensorOptions& options) {
  auto with_channels = sizes.vec();
  with_channels.push_back(channels);
  return {at::zeros(with_channels, options),
          at::full(sizes, -std::numeric_limits<double>::infinity(), options)};
}

PartialAttention PartialAttention::merge(const PartialAttention& a,
                                         const PartialAttention& b) {
  check_alike(a, b);
  const at::Tensor lse = at::logaddexp(a.lse, b.lse);
  const auto share = [&](const PartialAttention& part) {
    return part.out * weight(part.lse, lse).unsqueeze(-1);
  };
  return {share(a) + share(b), lse};
}

void PartialAttention::add(const PartialAttention& other) {
  check_alike(*this, other);
  if (merged_on_device(*this, other)) return;
  const PartialAttention both = merge(*this, other);
  out.copy_(both.out);
  lse.copy_(both.lse);
}

at::Tensor PartialAttention::with_sink(const at::Tensor& sink) const {
  const at::Tensor share = (lse - sink.to(lse.scalar_type())).sigmoid();
  return at::where(at::isneginf(lse), at::zeros({}, lse.options()), share)
             .unsqueeze(-1) *
         out;
}

}  // namespace longspan
