#include "longspan/ops/select_keys/inputs.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

void check_indexer(const char* who, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& weights) {
  check(q.dim() == 3 || q.dim() == 4, who, ": `q` is ", describe(q),
        "; expected [Tq, H, D] or [B, Tq, H, D]");
  check(element_type(q.scalar_type()).has_value(), who, ": `q` is ",
        describe(q), "; expected float32, bfloat16, float16 or float64");
  check(k.dim() == q.dim() - 1 && k.sym_size(-1) == q.sym_size(-1), who,
        ": `k` is ", describe(k), " but `q` ", describe(q),
        "; expected [Tk, D] after as many rows, with the same channels");
  check(k.scalar_type() == q.scalar_type(), who, ": `k` is ", describe(k),
        " but `q` ", describe(q), "; they have the same type");
  check_same_device(who, "k", k, q);
  check(q.sym_size(-1) >= 1 && q.sym_size(-1) <= kMostChannels, who,
        ": `q` is ", describe(q), "; expected 1 to ", kMostChannels,
        " channels");
  check(k.sym_size(-2) <= std::numeric_limits<int32_t>::max(), who, ": `k` is ",
        describe(k), "; keys are counted in 32 bits");
  const auto sums = accumulation_type(q.scalar_type());
  check(weights.dim() == q.dim() - 1 &&
            weights.sym_size(-1) == q.sym_size(-2) &&
            weights.sym_size(-2) == q.sym_size(-3),
        who, ": `weights` is ", describe(weights), " but `q` ", describe(q),
        "; expected one for each query and head");
  check(weights.scalar_type() == sums, who, ": `weights` is ",
        describe(weights), "; expected ", sums, ", what scores are summed in");
  check_same_device(who, "weights", weights, q);
  if (q.dim() == 4) {
    check(
        k.sym_size(0) == q.sym_size(0) && weights.sym_size(0) == q.sym_size(0),
        who, ": `q` is ", describe(q), ", `k` ", describe(k), " and `weights` ",
        describe(weights), "; the rows differ");
  }
}

void check_listed(const char* who, const at::Tensor& q,
                  const at::Tensor& indices) {
  const auto type = indices.scalar_type();
  const auto queries = static_cast<std::size_t>(q.dim() - 2);
  check((type == at::kInt || type == at::kLong) &&
            indices.dim() == q.dim() - 1 &&
            indices.sym_sizes().slice(0, queries) ==
                q.sym_sizes().slice(0, queries),
        who, ": `indices` is ", describe(indices), " but `q` ", describe(q),
        "; expected int32 or int64 [Tq, slots] after as many rows");
  check_same_device(who, "indices", indices, q);
}

void check_slots(const char* who, const c10::SymInt& slots) {
  // Each query gets them all, used or not.
  constexpr int64_t kMostSlots = int64_t{1} << 20;
  check(slots >= 0 && slots <= kMostSlots, who, ": ", slots,
        " slots; expected 0 to ", kMostSlots);
}

void check_window(const char* who, const char* name, const at::Tensor& window,
                  c10::SymIntArrayRef queries, at::Device device) {
  check(
      (window.scalar_type() == at::kInt || window.scalar_type() == at::kLong) &&
          window.sym_sizes() == queries,
      who, ": `", name, "` is ", describe(window), "; expected int32 ", queries,
      ", a border for each query");
  check(window.device() == device, who, ": `", name, "` is on ",
        window.device(), " but the queries on ", device);
}

at::Tensor as_window(const at::Tensor& window, int64_t keys) {
  return window.clamp(0, keys).to(at::kInt).contiguous();
}

IndexerInputs IndexerInputs::of(const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& weights) {
  const auto with_row = [&](const at::Tensor& t) {
    return q.dim() == 4 ? t : t.unsqueeze(0);
  };
  return {with_contiguous_channels(with_row(q)),
          with_contiguous_channels(with_row(k)),
          with_row(weights).contiguous()};
}

void IndexerInputs::fill(KeyScoreArgs& args, int64_t slots) const {
  const auto type = element_type(q.scalar_type());
  promise(type.has_value(), "select_keys: ", q.scalar_type(), " came this far");
  args.type = *type;
  args.rows = q.size(0);
  args.queries = q.size(1);
  args.keys = k.size(1);
  args.heads = q.size(2);
  args.head_dim = static_cast<int>(q.size(3));
  args.q = array_of<const void*>(q);
  args.k = without_heads<const void*>(k);
  args.weights = array_of<const void*>(weights);
  args.slots = slots;
}

}  // namespace longspan
