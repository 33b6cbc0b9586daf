#include "longspan/comm/tokens_before.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

/// Made of operators that have derivatives.
at::Tensor halo_of(const at::Tensor& x, const at::Tensor& sends,
                   const at::Tensor& places, c10::SymInt received,
                   std::string_view group) {
  const char* const who = "tokens_before";
  check(x.dim() >= 1, who, ": `x` has no axes; expected [tokens, ..]");
  check(places.dim() == 1 && places.scalar_type() == at::kLong &&
            places.device() == x.device(),
        who, ": `places` is ", describe(places),
        "; expected int64 [n] beside `x`");
  static const auto exchange =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("longspan::exchange_needed", "")
          .typed<at::Tensor(const at::Tensor&, int64_t, const at::Tensor&,
                            c10::SymInt, std::string_view)>();
  const at::Tensor came =
      exchange.call(x, 0, sends, std::move(received), group);
  auto sizes = x.sym_sizes().vec();
  sizes[0] = 1;
  return at::cat({came, at::zeros_symint(sizes, x.options())})
      .index_select(0, places);
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "tokens_before(Tensor x, Tensor sends, Tensor places, SymInt received, "
      "str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, CompositeImplicitAutograd, m) {
  m.impl("tokens_before", halo_of);
}

}  // namespace

at::Tensor tokens_before(const at::Tensor& x, const at::Tensor& sends,
                         const at::Tensor& places, int64_t received,
                         const Group& group) {
  return halo_of(x, sends, places, received, group.name());
}

}  // namespace longspan
