#include "longspan/models/mamba2.h"

#include <ATen/ATen.h>

#include "longspan/core/detail/check.h"
#include "longspan/models/detail/run_chunks.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

void check_tensors(const Mamba2Tensors& t, const LayerShare& share) {
  const char* const who = "mamba2_scan";
  const int64_t any = LayerShare::kAny;
  share.check_tokens(who, "x", t.x, {any, any});
  const int64_t heads = t.x.size(1);
  share.check_tokens(who, "dt", t.dt, {heads});
  share.check_tokens(who, "B", t.B, {any, any});
  const int64_t groups = t.B.size(1);
  check(groups > 0 && heads % groups == 0, who, ": `B` is ", describe(t.B),
        "; expected a number of groups that divides ", heads, " heads");
  share.check_tokens(who, "C", t.C, {groups, t.B.size(2)});
  check(t.A.defined() && t.A.dim() == 1 && t.A.size(0) == heads, who,
        ": `A` is ", t.A.defined() ? describe(t.A) : std::string("not there"),
        "; expected [", heads, "]");
  check(!t.D.defined() || (t.D.dim() == 1 && t.D.size(0) == heads), who,
        ": `D` is ", t.D.defined() ? describe(t.D) : std::string(),
        "; expected [", heads, "]");
}

}  // namespace

at::Tensor mamba2_scan(const Mamba2Tensors& tensors, const LayerShare& share,
                       int64_t chunk) {
  check_tensors(tensors, share);
  const auto type = sum_type(tensors.x);
  const int64_t heads = tensors.x.size(1), channels = tensors.x.size(2);
  const int64_t groups = tensors.B.size(1), states = tensors.B.size(2);
  const RunChunks& chunks =
      share.chunks(chunk, pair_of(type, heads, heads * channels * states));
  const int64_t n = chunks.chunks, length = chunks.length;
  const int64_t of_group = heads / groups;  // heads
  const auto taken = [&](const at::Tensor& x) {
    return chunks.take(x).to(type);
  };
  // [n, H, length, P] and so on: what a product needs lies last.
  const at::Tensor dt = taken(tensors.dt).transpose(1, 2);
  const at::Tensor whole = taken(tensors.x).transpose(1, 2);
  const at::Tensor x = whole * dt.unsqueeze(-1);
  const at::Tensor b = taken(tensors.B).transpose(1, 2);  // [n, G, length, N]
  const at::Tensor c = taken(tensors.C).transpose(1, 2);
  // The log of what is left after each token of what came into its chunk.
  const at::Tensor left =
      (dt * tensors.A.to(type).unsqueeze(-1)).cumsum(2);  // [n, H, length]
  const at::Tensor all = left.narrow(2, length - 1, 1);

  const auto by_head = [&](const at::Tensor& t) {  // [n, G, ..] -> [n, H, ..]
    return t.unsqueeze(2)
        .expand({n, groups, of_group, t.size(2), t.size(3)})
        .reshape({n, heads, t.size(2), t.size(3)});
  };
  // Tokens of a chunk among each other.
  const at::Tensor between = left_between(left);
  at::Tensor out = (by_head(c.matmul(b.transpose(2, 3))) * between).matmul(x);

  // What a chunk adds to a state, and how much of one it leaves: [n, H, P, N].
  const at::Tensor added =
      (x * (all - left).exp().unsqueeze(-1)).transpose(2, 3).matmul(by_head(b));
  const at::Tensor kept = all.exp().squeeze(2);  // [n, H]
  const ChunkRecurrence recurrence = {
      .step =
          [&](const at::Tensor& before, int64_t first, bool adds) {
            const int64_t count = before.size(0);
            const at::Tensor factor = kept.narrow(0, first, count);
            if (!adds) return before * factor;
            return before * factor.view({count, heads, 1, 1}) +
                   added.narrow(0, first, count);
          },
      .state = at::zeros({heads, channels, states}, x.options()),
      .transition = at::ones({heads}, x.options())};
  const at::Tensor tie =
      tie_of({tensors.x, tensors.dt, tensors.A, tensors.B, tensors.C}, type);
  const at::Tensor before =
      states_before(chunks, recurrence, tie, share.group());

  // Heads of a group read their states with the same rows of C.
  const at::Tensor by_group =
      before.reshape({n, groups, of_group * channels, states});
  const at::Tensor read = c.matmul(by_group.transpose(2, 3))
                              .reshape({n, groups, length, of_group, channels})
                              .transpose(2, 3)
                              .reshape({n, heads, length, channels});
  out = out + read * left.exp().unsqueeze(-1);
  if (tensors.D.defined()) {
    out = out + whole * tensors.D.to(type).view({heads, 1, 1});
  }
  return chunks.give(out.transpose(1, 2)).to(tensors.x.scalar_type());
}

}  // namespace longspan
