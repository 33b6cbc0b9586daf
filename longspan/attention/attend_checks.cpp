#include <ATen/ATen.h>

#include <cmath>

#include "longspan/attention/detail/run.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

void check_attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const OptionalTensor& sink, double scale, double softcap) {
  check(q.dim() == 3 || q.dim() == 4, "attend: `q` is ", describe(q),
        "; expected [B, H, L, D] or [L, H, D]");
  const auto dtype = q.scalar_type();
  check(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
            dtype == at::kDouble,
        "attend: `q` is ", describe(q),
        "; expected float32, bfloat16, float16 or float64");
  const int64_t heads = 1;  // in both layouts
  const int64_t tokens = q.dim() == 4 ? 2 : 0;
  const auto same = [&](const char* name, const at::Tensor& t, int64_t axis) {
    check(t.dim() == q.dim(), "attend: `", name, "` is ", describe(t),
          " but `q` ", describe(q), "; they have the same axes");
    check(t.scalar_type() == dtype && t.device() == q.device(), "attend: `",
          name, "` is ", describe(t), " on ", t.device(), " but `q` ",
          describe(q), " on ", q.device());
    if (q.dim() == 4) {
      check(t.sym_size(0) == q.sym_size(0), "attend: `", name, "` is ",
            describe(t), " but `q` ", describe(q), "; the rows differ");
    }
    check(t.sym_size(tokens) == q.sym_size(tokens), "attend: `", name, "` is ",
          describe(t), " but `q` ", describe(q),
          "; each rank brings the keys of its own tokens");
    check(axis < 0 || t.sym_size(axis) == q.sym_size(axis), "attend: `", name,
          "` is ", describe(t), " but `q` ", describe(q),
          "; the channels differ");
  };
  same("k", k, q.dim() - 1);
  same("v", v, -1);
  check(k.sym_size(heads) == v.sym_size(heads), "attend: `k` is ", describe(k),
        " but `v` ", describe(v), "; they have the same heads");
  check(k.sym_size(heads) > 0 && q.sym_size(heads) % k.sym_size(heads) == 0,
        "attend: `q` is ", describe(q), " but `k` ", describe(k),
        "; the heads of q must be a multiple of those of k");
  for (const at::Tensor& t : {q, v}) {
    check(t.sym_size(-1) >= 1 && t.sym_size(-1) <= kMostChannels,
          "attend: ", describe(t), " has ", t.sym_size(-1),
          " channels; expected 1 to ", kMostChannels);
  }
  if (sink) {
    check(sink->dim() == 1 && sink->sym_size(0) == q.sym_size(heads) &&
              sink->is_floating_point() && sink->device() == q.device(),
          "attend: `sink` is ", describe(*sink), " on ", sink->device(),
          "; expected one floating logit for each of the ", q.sym_size(heads),
          " heads on ", q.device());
  }
  check(std::isfinite(scale), "attend: scale is ", scale);
  check(std::isfinite(softcap) && softcap >= 0, "attend: softcap is ", softcap,
        "; expected a positive number, or 0 for none");
}

}  // namespace longspan
