#include "longspan/ops/attend_selected.h"

#include "longspan/attention/detail/call_facts.h"
#include "longspan/attention/detail/selected_call.h"
#include "longspan/attention/selected.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_selected/inputs.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace selected {

namespace {

struct AttendSelectedBackward {
  at::Tensor dout, q, kv, indices;
  OptionalTensor sink;
  at::Tensor out, lse;
  double scale = 1;
  int64_t value_dim = 0;
  bool exact_dkv = false;  ///< dkv in the accumulation type
  Where where = {};

  using Result = Tensors3;
  static constexpr auto kDerivativeOf = "attend_selected";
  static constexpr auto kSchema =
      "attend_selected_backward(Tensor dout, Tensor q, Tensor kv, "
      "Tensor indices, Tensor? sink, Tensor out, Tensor lse, float scale, "
      "int value_dim, bool exact_dkv=False, Tensor? layout=None, "
      "str fetch=\"gathered\", str group=\"\") -> (Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(
        std::tie(self.dout, self.q, self.kv, self.indices, self.sink, self.out,
                 self.lse, self.scale, self.value_dim, self.exact_dkv),
        Where::fields(self.where));
  }

  void check_all() const {
    check_selected(kDerivativeOf, q, kv, indices, sink, scale, value_dim);
    check_keys(kDerivativeOf, "kv", kv, q, where.layout);
    check_answer("attend_selected_backward", q, value_dim, out, lse, dout);
  }

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const {
    check_all();
    const auto dkv_type =
        exact_dkv ? accumulation_type(kv.scalar_type()) : kv.scalar_type();
    const auto backward = [&](const at::Tensor& keys, const at::Tensor& lists,
                              const auto& queries) {
      return attend_selected_backward(
          SelectedInputs::of(queries(q), keys, lists, sink, scale, value_dim),
          queries(dout), queries(out), queries(lse));
    };
    if (where.is_here(kDerivativeOf)) {
      const SelectedGradients found =
          backward(with_row(q, kv), with_row(q, indices),
                   [&](const at::Tensor& t) { return with_row(q, t); });
      return {found.dq.reshape(q.sizes()),
              found.dkv.to(dkv_type).reshape(kv.sizes()), found.dsink};
    }
    const Call call(kDerivativeOf, "selected attention backward", q, where);
    const FetchedKeys fetched = call.fetched(call.with_row(indices));
    const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
    const SelectedGradients found = backward(
        call.grouped(keys[0], kv), fetched.lists(),
        [&](const at::Tensor& t) { return fetched.queries(call.with_row(t)); });
    const auto home = fetched.home({found.dkv.flatten(2)}, "gradients");
    return {call.as_given(found.dq), call.like_keys(home[0].to(dkv_type), kv),
            found.dsink};
  }

  Result meta() const {
    check_all();
    return {empty_as(q), exact_dkv ? empty_sums(kv, 0, {}) : empty_as(kv),
            empty_dsink(sink, lse)};
  }
};

struct AttendSelected {
  at::Tensor q, kv, indices;
  OptionalTensor sink;
  double scale = 1;
  int64_t value_dim = 0;
  Where where = {};

  using Result = Tensors2;
  static constexpr auto kWho = "attend_selected";
  static constexpr auto kSchema =
      "attend_selected(Tensor q, Tensor kv, Tensor indices, Tensor? sink, "
      "float scale, int value_dim, Tensor? layout=None, "
      "str fetch=\"gathered\", str group=\"\") -> (Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.q, self.kv, self.indices, self.sink,
                                   self.scale, self.value_dim),
                          Where::fields(self.where));
  }

  void check_all() const {
    check_selected(kWho, q, kv, indices, sink, scale, value_dim);
    check_keys(kWho, "kv", kv, q, where.layout);
  }

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const {
    check_all();
    if (where.is_here(kWho)) {
      const PartialAttention found = attend_selected(
          SelectedInputs::of(q, kv, indices, sink, scale, value_dim));
      return {without_row(q, found.out), without_row(q, found.lse)};
    }
    const Call call(kWho, "selected attention forward", q, where);
    const FetchedKeys fetched = call.fetched(call.with_row(indices));
    const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
    const PartialAttention found = attend_selected(SelectedInputs::of(
        fetched.queries(call.with_row(q)), call.grouped(keys[0], kv),
        fetched.lists(), sink, scale, value_dim));
    return {call.as_given(found.out), call.as_given(found.lse)};
  }

  Result meta() const {
    check_all();
    check_meta(kWho, q);
    return {empty_out(q, value_dim), empty_sums(q, 1, {})};
  }

  void cast(const Casts& to) {
    q = to(q);
    kv = to(kv);
  }

  Tensors constants(const Tensors& outputs) const { return {outputs[1]}; }
  Tensors keep(const Tensors& outputs) const { return outputs; }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    const auto [dq, dkv, dsink] = Operator<AttendSelectedBackward>::call(
        {grads[0], q, kv, indices, sink, kept[0], kept[1], scale, value_dim,
         false, where});
    return {dq, dkv, {}, sink ? dsink.to(sink->scalar_type()) : at::Tensor()};
  }
};

/// A target: nobody's gradient goes through it.
struct SelectedWeights {
  at::Tensor q, kv, indices, lse;
  OptionalTensor sink;
  double scale = 1;
  Where where = {};

  using Result = at::Tensor;
  static constexpr auto kWho = "selected_weights";
  static constexpr auto kSchema =
      "selected_weights(Tensor q, Tensor kv, Tensor indices, Tensor lse, "
      "Tensor? sink, float scale, Tensor? layout=None, "
      "str fetch=\"gathered\", str group=\"\") -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.q, self.kv, self.indices, self.lse,
                                   self.sink, self.scale),
                          Where::fields(self.where));
  }

  void check_all() const {
    check_selected(kWho, q, kv, indices, sink, scale, 0);
    check_keys(kWho, "kv", kv, q, where.layout);
    const auto heads = static_cast<std::size_t>(q.dim() - 1);
    check(lse.sym_sizes() == q.sym_sizes().slice(0, heads) &&
              lse.scalar_type() == accumulation_type(q.scalar_type()),
          kWho, ": `lse` is ", describe(lse), " but `q` ", describe(q),
          "; expected what attend_selected returned");
    check_same_device(kWho, "lse", lse, q);
  }

  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const {
    check_all();
    const bool flat = kv.dim() != q.dim() && indices.dim() != q.dim();
    const auto shares = [&](const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& lists, const at::Tensor& logs) {
      const at::Tensor found = selected_weights(
          SelectedInputs::of(queries, keys, lists, sink, scale, 0), logs);
      return flat ? found.squeeze(-2) : found;
    };
    if (where.is_here(kWho)) {
      return without_row(q, shares(q, kv, indices, with_row(q, lse)));
    }
    const Call call(kWho, "weights of selected keys", q, where);
    const FetchedKeys fetched = call.fetched(call.with_row(indices));
    const auto keys = fetched.rows_of({call.tokens_first(kv)}, "keys");
    return call.as_given(shares(fetched.queries(call.with_row(q)),
                                call.grouped(keys[0], kv), fetched.lists(),
                                fetched.queries(call.with_row(lse))));
  }

  Result meta() const {
    check_all();
    check_meta(kWho, q);
    return empty_target(q, kv, indices.dim() == q.dim(), indices.sym_size(-1));
  }

  void cast(const Casts& to) {
    q = to(q);
    kv = to(kv);
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<AttendSelected>::add_to(m);
  Operator<AttendSelectedBackward>::add_to(m);
  Operator<SelectedWeights>::add_to(m);
}

SelectedAnswer attend(const at::Tensor& q, const at::Tensor& kv,
                      const at::Tensor& indices, const SelectedOptions& options,
                      Where where) {
  auto [out, lse] = Operator<AttendSelected>::call(
      {q, kv, indices, optional(options.sink), options.scale, options.value_dim,
       std::move(where)});
  return {out, lse};
}

at::Tensor weights(const at::Tensor& q, const at::Tensor& kv,
                   const at::Tensor& indices, const at::Tensor& lse,
                   const SelectedOptions& options, Where where) {
  return Operator<SelectedWeights>::call({q, kv, indices, lse,
                                          optional(options.sink), options.scale,
                                          std::move(where)});
}

}  // namespace

}  // namespace selected

using selected::Where;

SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const SelectedOptions& options) {
  return selected::attend(q, kv, indices, options, {});
}

SelectedAnswer attend_selected(const at::Tensor& q, const at::Tensor& kv,
                               const at::Tensor& indices,
                               const AttentionLayout& layout,
                               const Group& group,
                               const SelectedOptions& options, Fetch fetch) {
  return selected::attend(q, kv, indices, options,
                          Where::of(layout, group, fetch));
}

at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const SelectedOptions& options) {
  return selected::weights(q, kv, indices, lse, options, {});
}

at::Tensor selected_weights(const at::Tensor& q, const at::Tensor& kv,
                            const at::Tensor& indices, const at::Tensor& lse,
                            const AttentionLayout& layout, const Group& group,
                            const SelectedOptions& options, Fetch fetch) {
  return selected::weights(q, kv, indices, lse, options,
                           Where::of(layout, group, fetch));
}

}  // namespace longspan
