#include "longspan/ops/partial_attention.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/fold.h"

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

}  // namespace

at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::TensorOptions sums_like(const at::Tensor& tensor) {
  return tensor.options().dtype(accumulation_type(tensor.scalar_type()));
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
  const PlacedPart placed{.part = other};
  if (fold_on_device(this, {&placed, 1}, *this)) return;
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
