#include "longspan/ops/attend_dense.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace {

constexpr const char* kWho = "attend_dense";
constexpr double kNever = -std::numeric_limits<double>::infinity();

template <class Number>
double lowest() {
  return static_cast<double>(std::numeric_limits<Number>::lowest());
}

void check_dense(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const OptionalTensor& mask, const OptionalTensor& sink,
                 double scale) {
  check(q.dim() == 4 && q.is_floating_point(), kWho, ": `q` is ", describe(q),
        "; expected floating [B, H, T, D]");
  const auto check_keys = [&](const char* name, const at::Tensor& t) {
    check(t.dim() == 4 && t.scalar_type() == q.scalar_type() &&
              t.device() == q.device() && t.sym_size(0) == q.sym_size(0) &&
              t.sym_size(1) == k.sym_size(1) && t.sym_size(2) == k.sym_size(2),
          kWho, ": `", name, "` is ", describe(t), " on ", t.device(),
          " but `q` ", describe(q), " on ", q.device(), " and `k` ",
          describe(k));
  };
  check(k.dim() == 4, kWho, ": `k` is ", describe(k),
        "; expected [B, G, Tk, D]");
  check_keys("k", k);
  check_keys("v", v);
  check(k.sym_size(3) == q.sym_size(3) && k.sym_size(1) >= 1 &&
            q.sym_size(1) % k.sym_size(1) == 0,
        kWho, ": `k` is ", describe(k), " but `q` ", describe(q),
        "; channels are the same, and the heads of k divide those of q");
  if (mask) {
    check((mask->is_floating_point() || mask->scalar_type() == at::kBool) &&
              mask->dim() <= 4 && mask->device() == q.device(),
          kWho, ": `mask` is ", describe(*mask), " on ", mask->device(),
          "; expected bool (true = may see) or floating (added to scores), "
          "broadcast to [B, H, T, Tk]");
    const c10::SymInt sizes[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2),
                                 k.sym_size(2)};
    for (int64_t axis = 1; axis <= mask->dim(); ++axis) {
      const auto size = mask->sym_size(-axis);
      check(size == 1 || size == sizes[4 - axis], kWho, ": `mask` is ",
            describe(*mask), " but `q` ", describe(q), " and `k` ", describe(k),
            "; expected to broadcast to [B, H, T, Tk]");
    }
  }
  if (sink) {
    check(sink->dim() == 1 && sink->is_floating_point() &&
              sink->sym_size(0) == q.sym_size(1) &&
              sink->device() == q.device(),
          kWho, ": `sink` is ", describe(*sink), "; expected a logit for each ",
          "of the ", q.sym_size(1), " heads");
  }
  check(std::isfinite(scale), kWho, ": scale is ", scale);
}

/// [B, H, Tk, channels]: each head its own.
at::Tensor for_heads(const at::Tensor& t, const c10::SymInt& heads,
                     at::ScalarType sums) {
  const c10::SymInt each = heads / t.sym_size(1);
  return t.to(sums)
      .unsqueeze(2)
      .expand_symint(
          {t.sym_size(0), t.sym_size(1), each, t.sym_size(2), t.sym_size(3)})
      .flatten(1, 2);
}

/// Where an additive mask means "never".
at::Tensor hidden_by(const at::Tensor& mask) {
  if (mask.scalar_type() == at::kBool) return mask.logical_not();
  return mask.scalar_type() == at::kHalf ? mask <= lowest<at::Half>()
                                         : mask <= lowest<at::BFloat16>();
}

Tensors2 dense(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const OptionalTensor& mask, const OptionalTensor& sink,
               double scale) {
  check_dense(q, k, v, mask, sink, scale);
  const auto sums = accumulation_type(q.scalar_type());
  const c10::SymInt heads = q.sym_size(1);
  at::Tensor scores =
      at::matmul(q.to(sums), for_heads(k, heads, sums).transpose(-1, -2)) *
      scale;
  if (mask) {
    const at::Tensor hidden = hidden_by(*mask);
    if (mask->is_floating_point()) {
      scores = scores + mask->to(sums).masked_fill(hidden, 0);
    }
    scores = scores.masked_fill(hidden, kNever);
  }
  const double least = sums == at::kDouble ? lowest<double>() : lowest<float>();
  // What is taken off all logits of a row changes nothing, so it is a constant;
  // a dummy key that nobody sees gives rows without keys a finite number.
  const at::Tensor shown = at::constant_pad_nd(scores.detach(), {0, 1}, least);
  at::Tensor top = shown.amax(-1, /*keepdim=*/true);
  at::Tensor logits;
  if (sink) {
    logits = sink->to(sums).clamp(least / 4, -least / 4).view({1, -1, 1, 1});
    top = at::maximum(top, logits.detach());
  }
  const at::Tensor weights = (scores - top).exp();
  const at::Tensor over_keys = weights.sum(-1, /*keepdim=*/true);
  const at::Tensor total = sink ? over_keys + (logits - top).exp() : over_keys;
  const at::Tensor out = at::matmul(weights, for_heads(v, heads, sums)) /
                         total.masked_fill(total == 0, 1);
  const at::Tensor lse = scores.detach().logsumexp(-1);
  return {out.to(q.scalar_type()), lse};
}

const auto& dense_op() {
  static const auto op = find_op<decltype(dense)>("longspan::attend_dense");
  return op;
}

}  // namespace

DenseAnswer attend_dense(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const DenseOptions& options) {
  auto [out, lse] = dense_op().call(q, k, v, optional(options.mask),
                                    optional(options.sink), options.scale);
  return {out, lse};
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "attend_dense(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sink, "
      "float scale) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("attend_dense", dense);
}

}  // namespace longspan
