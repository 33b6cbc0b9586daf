#include "longspan/ops/document_windows.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

constexpr const char* kWho = "document_windows";
constexpr int64_t kNoMore = std::numeric_limits<int32_t>::max();

/// int32, and kNoMore for whatever is no offset: `more` entries at least.
at::Tensor edges_of(const at::Tensor& cu, const c10::SymInt& more) {
  const at::Tensor edges = cu.to(at::kInt);
  return at::constant_pad_nd_symint(edges.masked_fill(edges < 0, kNoMore),
                                    {0, more}, kNoMore);
}

std::tuple<at::Tensor, at::Tensor> windows(
    const at::Tensor& cu, const std::optional<at::Tensor>& cu_padded,
    c10::SymInt tokens) {
  const auto check_offsets = [](const char* name, const at::Tensor& t) {
    check(t.dim() == 1 && is_integral(t) && t.sym_size(0) >= 1, kWho, ": `",
          name, "` is ", describe(t), "; expected a vector of integer offsets");
  };
  check_offsets("cu", cu);
  if (cu_padded) {
    check_offsets("cu_padded", *cu_padded);
    check(cu_padded->device() == cu.device(), kWho, ": `cu_padded` is on ",
          cu_padded->device(), " but `cu` on ", cu.device());
  }
  check(tokens >= 0 && tokens < kNoMore, kWho, ": ", tokens,
        " tokens do not fit 32-bit windows");
  const at::Tensor& slots = cu_padded ? *cu_padded : cu;
  const c10::SymInt entries = cu.sym_size(0).max(slots.sym_size(0)) + 1;
  const at::Tensor edges = edges_of(slots, entries - slots.sym_size(0));
  const at::Tensor token =
      at::arange(at::Scalar(tokens), edges.options().dtype(at::kInt));
  // The last edge at or before the token; -1 before all of them.
  const at::Tensor found =
      at::searchsorted(edges, token, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor document = found.clamp_min(0);
  const at::Tensor next = edges.index_select(0, document + 1);
  at::Tensor start = edges.index_select(0, document);
  at::Tensor end = token + 1;
  if (cu_padded) {
    const at::Tensor real = edges_of(cu, entries - cu.sym_size(0));
    const at::Tensor length =
        real.index_select(0, document + 1) - real.index_select(0, document);
    end = at::maximum(at::minimum(end, start + length), start + 1);
  }
  const at::Tensor alone = (found < 0).logical_or(next == kNoMore);
  return {at::where(alone, token, start), at::where(alone, token + 1, end)};
}

}  // namespace

KeyWindows document_windows(const at::Tensor& cu,
                            const std::optional<at::Tensor>& cu_padded,
                            int64_t tokens) {
  auto [start, end] = windows(cu, cu_padded, tokens);
  return {start, end};
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "document_windows(Tensor cu, Tensor? cu_padded, SymInt tokens) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("document_windows", windows);
}

}  // namespace longspan
