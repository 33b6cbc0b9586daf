#include "longspan/attention/attend.h"

#include <ATen/ATen.h>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>

#include "longspan/attention/detail/rank_layout.h"
#include "longspan/attention/detail/run.h"
#include "longspan/comm/detail/call.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_tiles.h"
#include "longspan/ops/registering.h"

namespace longspan {

namespace {

/// Runs attend, or its backward, as one call of the group.
template <class Op, class Run>
auto call_together(const char* who, const Op& op, const Run& run) {
  if (op.group.empty()) return run();
  const Group group = Group::named(op.group);
  return as_call(group, who, [&](CallScope& call) {
    call.begin([&] {
      const int64_t tokens = op.q.dim() == 4 ? 2 : 0;
      const auto facts = [&](const at::Tensor& t) {
        return facts_of(t, {tokens});
      };
      return quickly(op.strategy, ", teams of ", op.head_ranks, "; q ",
                     facts(op.q), "; k ", facts(op.k), "; v ", facts(op.v),
                     "; ", op.sink ? "sink " + facts_of(*op.sink) : "no sink",
                     "; scale ", op.scale, "; softcap ", op.softcap, "; ",
                     RankLayout::of("attend", op.layout, group)->words(),
                     gradient_facts());
    });
    return run();
  });
}

struct AttendBackward {
  at::Tensor dout, q, k, v;
  OptionalTensor sink;
  at::Tensor out, lse, layout;
  double scale = 1, softcap = 0;
  std::string strategy;
  int64_t head_ranks = 0;
  std::string group;

  using Result = Tensors4;
  static constexpr auto kDerivativeOf = "attend";
  static constexpr auto kSchema =
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, "
      "Tensor? sink, Tensor out, Tensor lse, Tensor layout, float scale, "
      "float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.dout, self.q, self.k, self.v, self.sink, self.out,
                    self.lse, self.layout, self.scale, self.softcap,
                    self.strategy, self.head_ranks, self.group);
  }

  template <class Run>
  auto together(const Run& run) const {
    return call_together("attend backward", *this, run);
  }
  Result run() const {
    return attend_backward(dout, q, k, v, sink, out, lse, layout, scale,
                           softcap, strategy, head_ranks, group);
  }
  Result meta() const {
    return {empty_as(q), empty_as(k), empty_as(v),
            sink ? empty_as(*sink) : at::empty({0}, q.options())};
  }
};

struct Attend {
  at::Tensor q, k, v;
  OptionalTensor sink;
  at::Tensor layout;
  double scale = 1, softcap = 0;
  std::string strategy;
  int64_t head_ranks = 0;
  std::string group;

  using Result = Tensors2;
  static constexpr auto kSchema =
      "attend(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor layout, "
      "float scale, float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.q, self.k, self.v, self.sink, self.layout, self.scale,
                    self.softcap, self.strategy, self.head_ranks, self.group);
  }

  template <class Run>
  auto together(const Run& run) const {
    return call_together("attend", *this, run);
  }
  Result run() const {
    return attend_forward(q, k, v, sink, layout, scale, softcap, strategy,
                          head_ranks, group);
  }
  Result meta() const {
    check_attend(q, k, v, sink, scale, softcap);
    check(q.is_meta(), "attend: `layout` is on meta, which holds no values; ",
          "keep the tensor of an AttentionLayout on the CPU");
    auto sizes = q.sym_sizes().vec();
    sizes.back() = v.sym_size(-1);
    return {at::empty_symint(sizes, q.options()), empty_sums(q, 1, {})};
  }

  void cast(const Casts& to) {
    for (at::Tensor* t : {&q, &k, &v}) *t = to(*t);
  }

  Tensors constants(const Tensors& outputs) const { return {outputs[1]}; }
  Tensors keep(const Tensors& outputs) const { return outputs; }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    const auto [dq, dk, dv, dsink] = Operator<AttendBackward>::call(
        {grads[0], q, k, v, sink, kept[0], kept[1], layout, scale, softcap,
         strategy, head_ranks, group});
    return {dq, dk, dv, sink ? dsink : at::Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<Attend>::add_to(m);
  Operator<AttendBackward>::add_to(m);
}

}  // namespace

std::string which_kernel(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const std::vector<Mask>& masks,
                         const AttendOptions& options) {
  check_attend(q, k, v, {}, options.scale.value_or(1), options.softcap);
  AttentionInputs inputs;
  inputs.q = rows_first(q);
  inputs.k = rows_first(k);
  inputs.v = rows_first(v);
  inputs.heads_per_key_head = q.size(1) / k.size(1);
  inputs.softcap = options.softcap;
  const auto layout = AttentionLayout::of(
      Ownership::contiguous(inputs.q.size(1), 1),
      masks.empty()
          ? std::vector{Mask::causal(Packing::single(inputs.q.size(1)))}
          : masks);
  const Plan plan = Plan::of(layout, Strategy{}, 0, inputs.q.size(0));
  return which_kernel(inputs, plan.steps()[0].lines);
}

at::Tensor layout_tensor(const AttentionLayout& layout) {
  // A constant also where torch.func would wrap what is made.
  const c10::impl::ExcludeDispatchKeyGuard outside(
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  const std::vector<int64_t> code = layout.encode();
  return at::tensor(code, at::TensorOptions(at::kLong));
}

Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const AttentionLayout& layout, const Group& group,
                const AttendOptions& options) {
  check(q.defined() && k.defined() && v.defined(),
        "attend: `q`, `k` or `v` is not a tensor");
  check(q.dim() > 0, "attend: `q` has no axes");
  const double scale = options.scale.value_or(
      1 / std::sqrt(static_cast<double>(std::max<int64_t>(q.size(-1), 1))));
  const std::string strategy(options.strategy.name());
  const int head_ranks = std::max(options.strategy.head_ranks, 0);
  // The operator takes a name, and not every strategy has its own.
  check(Strategy::named(strategy, head_ranks) == options.strategy,
        "attend: the strategy is ", options.strategy.to_string(),
        "; teams of several ranks pass keys on in a ring");
  auto [out, lse] = Operator<Attend>::call(
      {q, k, v, optional(options.sink), layout_tensor(layout), scale,
       options.softcap, strategy, head_ranks, group.name()});
  return {out, lse};
}

std::shared_ptr<const Plan> plan_for(const at::Tensor& layout,
                                     const std::string& strategy,
                                     int head_ranks, int64_t key_heads,
                                     int64_t rows, const Group& group) {
  return RankLayout::of("attend", layout, group)
      ->plan(
          Strategy::named(strategy, head_ranks).over(group.size(), key_heads),
          rows);
}

}  // namespace longspan
