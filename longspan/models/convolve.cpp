#include "longspan/models/convolve.h"

#include <ATen/ATen.h>

#include "longspan/comm/collectives.h"
#include "longspan/core/detail/check.h"
#include "longspan/models/detail/run_chunks.h"
#include "longspan/ops/checks.h"

namespace longspan {

at::Tensor convolve_runs(const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias, const LayerShare& share) {
  const char* const who = "convolve_runs";
  share.check_tokens(who, "x", x, {LayerShare::kAny});
  const int64_t channels = x.size(1);
  check(weight.dim() == 3 && weight.size(0) == channels &&
            weight.size(1) == 1 && weight.size(2) >= 1,
        who, ": `weight` is ", describe(weight), "; expected [", channels,
        ", 1, taps]");
  check(!bias.defined() || (bias.dim() == 1 && bias.size(0) == channels), who,
        ": `bias` is ", bias.defined() ? describe(bias) : std::string(),
        "; expected [", channels, "]");
  const int64_t taps = weight.size(2);
  const LayerShare::Halo& halo = share.halo(taps - 1);
  const at::Tensor came = exchange_needed(x, 0, halo.sends, share.group());
  const auto type = sum_type(x);
  const at::Tensor zero = at::zeros({1, channels}, x.options());
  const at::Tensor rows = at::cat({x, came, zero});
  const at::Tensor places =
      at::where(halo.seen < 0, rows.size(0) - 1, halo.seen);
  at::Tensor out;
  for (int64_t k = 0; k < taps; ++k) {
    const at::Tensor seen = rows.index_select(0, places.select(1, k)).to(type);
    const at::Tensor part = seen * weight.select(2, k).select(1, 0).to(type);
    out = out.defined() ? out + part : part;
  }
  if (bias.defined()) {
    const at::Tensor added = out + bias.to(type);
    out = share.has_pads()
              ? at::where(share.real().unsqueeze(1), added, at::zeros_like(out))
              : added;
  }
  return out.to(x.scalar_type());
}

}  // namespace longspan
