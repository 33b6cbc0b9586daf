#include "longspan/ops/attend_selected/inputs.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

bool is_index(const at::Tensor& t) {
  return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
}

}  // namespace

void check_same_device(const char* who, const char* name, const at::Tensor& t,
                       const at::Tensor& q) {
  check(t.device() == q.device(), who, ": `", name, "` is on ", t.device(),
        " but `q` on ", q.device());
}

void check_like(const char* who, const char* name, const at::Tensor& t,
                c10::SymIntArrayRef sizes, at::ScalarType dtype,
                const at::Tensor& q) {
  check(t.sym_sizes() == sizes && t.scalar_type() == dtype, who, ": `", name,
        "` is ", describe(t), "; expected ", dtype, " ", sizes);
  check_same_device(who, name, t, q);
}

at::Tensor as_slots(const at::Tensor& indices, int64_t keys) {
  if (indices.scalar_type() == at::kInt) return indices;
  return at::where((indices >= 0).logical_and_(indices < keys), indices, -1)
      .to(at::kInt);
}

void check_selected(const char* who, const at::Tensor& q, const at::Tensor& kv,
                    const at::Tensor& indices,
                    const std::optional<at::Tensor>& sink, double scale,
                    int64_t value_dim) {
  check(q.dim() == 3 || q.dim() == 4, who, ": `q` is ", describe(q),
        "; expected [Tq, H, D] or [B, Tq, H, D]");
  check(element_type(q.scalar_type()).has_value(), who, ": `q` is ",
        describe(q), "; expected float32, bfloat16, float16 or float64");
  const bool grouped = kv.dim() == q.dim();
  check(grouped || kv.dim() == q.dim() - 1, who, ": `kv` is ", describe(kv),
        " but `q` ", describe(q),
        "; expected [Tk, D] or [Tk, G, D], after as many rows as q has");
  check(kv.scalar_type() == q.scalar_type(), who, ": `kv` is ", describe(kv),
        " but `q` ", describe(q), "; they have the same type");
  check_same_device(who, "kv", kv, q);
  const auto heads = q.sym_size(-2), channels = q.sym_size(-1);
  check(kv.sym_size(-1) == channels, who, ": `kv` is ", describe(kv),
        " but `q` ", describe(q), "; the channels differ");
  check(kv.sym_size(q.dim() - 3) <= std::numeric_limits<int32_t>::max(), who,
        ": `kv` is ", describe(kv), "; keys are counted in 32 bits");
  check(channels >= 1 && channels <= kMostChannels, who, ": `q` is ",
        describe(q), "; expected 1 to ", kMostChannels, " channels");
  check(value_dim >= 0 && channels >= value_dim, who, ": value_dim is ",
        value_dim, " but keys have ", channels,
        " channels; values are the first of them, 0 stands for all");
  check(is_index(indices), who, ": `indices` is ", describe(indices),
        "; expected int32 or int64");
  check_same_device(who, "indices", indices, q);
  const bool listed = indices.dim() == q.dim();  // a list for each group
  check(listed || indices.dim() == q.dim() - 1, who, ": `indices` is ",
        describe(indices), " but `q` ", describe(q),
        "; expected [Tq, slots] or [Tq, G, slots], after as many rows");
  if (q.dim() == 4) {
    check(
        kv.sym_size(0) == q.sym_size(0) && indices.sym_size(0) == q.sym_size(0),
        who, ": `q` is ", describe(q), ", `kv` ", describe(kv),
        " and `indices` ", describe(indices), "; the rows differ");
  }
  check(indices.sym_size(q.dim() - 3) == q.sym_size(-3), who, ": `indices` is ",
        describe(indices), " but `q` ", describe(q),
        "; expected a list for each query");
  const c10::SymInt groups = grouped ? kv.sym_size(-2) : c10::SymInt(1);
  check(groups >= 1 && heads % groups == 0, who, ": `kv` is ", describe(kv),
        " but `q` ", describe(q), "; the groups of kv must divide the heads");
  if (listed) {
    check(indices.sym_size(-2) == groups || indices.sym_size(-2) == 1, who,
          ": `indices` is ", describe(indices), " but `kv` ", describe(kv),
          "; expected a list for each group, or one for all");
  }
  if (sink) {
    check(sink->dim() == 1 && sink->sym_size(0) == heads &&
              sink->is_floating_point(),
          who, ": `sink` is ", describe(*sink), "; expected a logit for each ",
          "of the ", heads, " heads");
    check_same_device(who, "sink", *sink, q);
  }
  check(std::isfinite(scale), who, ": scale is ", scale);
}

void check_answer(const char* who, const at::Tensor& q, int64_t value_dim,
                  const at::Tensor& out, const at::Tensor& lse,
                  const at::Tensor& dout) {
  auto sizes =
      q.sym_sizes().slice(0, static_cast<std::size_t>(q.dim() - 1)).vec();
  check_like(who, "lse", lse, sizes, accumulation_type(q.scalar_type()), q);
  sizes.push_back(value_dim == 0 ? q.sym_size(-1) : c10::SymInt(value_dim));
  check_like(who, "out", out, sizes, q.scalar_type(), q);
  check_like(who, "dout", dout, sizes, q.scalar_type(), q);
}

SelectedInputs SelectedInputs::of(const at::Tensor& q, const at::Tensor& kv,
                                  const at::Tensor& indices,
                                  const std::optional<at::Tensor>& sink,
                                  double scale, int64_t value_dim) {
  const bool grouped = kv.dim() == q.dim();
  const bool listed = indices.dim() == q.dim();
  const auto with_row = [&](const at::Tensor& t) {
    return q.dim() == 4 ? t : t.unsqueeze(0);
  };
  SelectedInputs in;
  in.q = with_contiguous_channels(with_row(q));
  in.kv = with_contiguous_channels(with_row(grouped ? kv : kv.unsqueeze(-2)));
  const at::Tensor lists = with_contiguous_channels(as_slots(
      with_row(listed ? indices : indices.unsqueeze(-2)), in.kv.size(1)));
  in.indices = lists.expand({-1, -1, in.kv.size(2), -1});
  if (sink) in.sink = sink->to(accumulation_type(q.scalar_type())).contiguous();
  in.scale = scale;
  in.value_dim = value_dim == 0 ? q.size(-1) : value_dim;
  return in;
}

void SelectedInputs::fill(SelectedAttentionArgs& args) const {
  const auto type = element_type(q.scalar_type());
  promise(type.has_value(), "attend_selected: ", q.scalar_type(),
          " came this far");
  args.type = *type;
  args.rows = q.size(0);
  args.queries = q.size(1);
  args.keys = kv.size(1);
  args.heads = q.size(2);
  args.key_heads = key_heads();
  args.slots = slots();
  args.head_dim = static_cast<int>(q.size(3));
  args.value_dim = static_cast<int>(value_dim);
  args.scale = scale;
  args.q = array_of<const void*>(q);
  args.kv = array_of<const void*>(kv);
  args.indices = {indices.const_data_ptr<int32_t>(), indices.stride(0),
                  indices.stride(1), indices.stride(2)};
}

}  // namespace longspan
