#include "longspan/models/delta.h"

#include <ATen/ATen.h>

#include <cmath>

#include "longspan/core/detail/check.h"
#include "longspan/models/detail/run_chunks.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

void check_tensors(const DeltaTensors& t, const LayerShare& share) {
  const char* const who = "delta_rule";
  const int64_t any = LayerShare::kAny;
  share.check_tokens(who, "q", t.q, {any, any});
  share.check_tokens(who, "k", t.k, {t.q.size(1), t.q.size(2)});
  share.check_tokens(who, "v", t.v, {any, any});
  const int64_t heads = t.v.size(1);
  check(t.q.size(1) > 0 && heads % t.q.size(1) == 0, who, ": `q` is ",
        describe(t.q), "; expected a number of heads that divides the ", heads,
        " of `v`");
  share.check_tokens(who, "g", t.g, {heads});
  share.check_tokens(who, "beta", t.beta, {heads});
}

at::Tensor normalized(const at::Tensor& x) {
  return x * (x * x).sum(-1, /*keepdim=*/true).add(1e-6).rsqrt();
}

}  // namespace

at::Tensor delta_rule(const DeltaTensors& tensors, const LayerShare& share,
                      const DeltaOptions& options) {
  check_tensors(tensors, share);
  const auto type = sum_type(tensors.v);
  const int64_t heads = tensors.v.size(1), columns = tensors.v.size(2);
  const int64_t rows = tensors.q.size(2);
  const RunChunks& chunks = share.chunks(
      options.chunk, pair_of(type, heads * rows * rows, heads * rows * columns,
                             /*matrix_rows=*/rows));
  const int64_t length = chunks.length;
  const auto taken = [&](const at::Tensor& x) {  // [n, heads, length, ..]
    return chunks.take(x).transpose(1, 2).to(type);
  };
  const auto by_head = [&](const at::Tensor& x) {
    const at::Tensor one = options.normalize ? normalized(x) : x;
    return one.repeat_interleave(heads / x.size(1), 1);
  };
  const at::Tensor q =
      by_head(taken(tensors.q)) / std::sqrt(static_cast<double>(rows));
  const at::Tensor k = by_head(taken(tensors.k));
  const at::Tensor beta = taken(tensors.beta).unsqueeze(-1);
  // The log of what is left after each token of what came into its chunk.
  const at::Tensor left = taken(tensors.g).cumsum(2);
  const at::Tensor all = left.narrow(2, length - 1, 1);

  const at::Tensor between = left_between(left);
  // What each token writes depends on what those before it in the chunk have
  // written: a triangular system, solved for values and for reads of a state.
  const at::Tensor written = k * beta;
  const at::Tensor system =
      (written.matmul(k.transpose(2, 3)) * between).tril(-1);
  const at::Tensor solved = at::linalg_solve_triangular(
      system,
      at::cat({taken(tensors.v) * beta, written * left.exp().unsqueeze(-1)},
              -1),
      /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
  const at::Tensor values = solved.narrow(3, 0, columns);
  const at::Tensor reads = solved.narrow(3, columns, rows);

  const at::Tensor keys =
      (k * (all - left).exp().unsqueeze(-1)).transpose(2, 3);
  const at::Tensor kept = all.exp().unsqueeze(-1);  // [n, H, 1, 1]
  const ChunkRecurrence recurrence = {
      .step =
          [&](const at::Tensor& before, int64_t first, bool adds) {
            const int64_t count = before.size(0);
            const auto of = [&](const at::Tensor& t) {
              return t.narrow(0, first, count);
            };
            const at::Tensor over = of(reads).matmul(before);
            const at::Tensor now = adds ? of(values) - over : -over;
            return before * of(kept) + of(keys).matmul(now);
          },
      .state = at::zeros({heads, rows, columns}, k.options()),
      .transition = at::eye(rows, k.options()).expand({heads, rows, rows})};
  const at::Tensor tie =
      tie_of({tensors.q, tensors.k, tensors.v, tensors.g, tensors.beta}, type);
  const at::Tensor before =
      states_before(chunks, recurrence, tie, share.group());

  const at::Tensor now = values - reads.matmul(before);
  const at::Tensor out = (q * left.exp().unsqueeze(-1)).matmul(before) +
                         (q.matmul(k.transpose(2, 3)) * between).matmul(now);
  return chunks.give(out.transpose(1, 2)).to(tensors.v.scalar_type());
}

}  // namespace longspan
