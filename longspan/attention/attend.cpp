#include "longspan/attention/attend.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "longspan/attention/head_trade.h"
#include "longspan/attention/passes.h"
#include "longspan/core/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kMostChannels = 576;

/// What came, checked as far as shapes go: the same on every rank, and all that
/// tracing can see.
void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
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
          name, "` is ", describe(t), " on ", t.device().str(), " but `q` ",
          describe(q), " on ", q.device().str());
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
          "attend: `sink` is ", describe(*sink), " on ", sink->device().str(),
          "; expected one floating logit for each of the ", q.sym_size(heads),
          " heads on ", q.device().str());
  }
  check(std::isfinite(scale), "attend: scale is ", scale);
  check(std::isfinite(softcap) && softcap >= 0, "attend: softcap is ", softcap,
        "; expected a positive number, or 0 for none");
}

/// [rows, tokens, heads, channels] of either layout, channels contiguous.
at::Tensor rows_first(const at::Tensor& tensor) {
  const at::Tensor view =
      tensor.dim() == 4 ? tensor.transpose(1, 2) : tensor.unsqueeze(0);
  return view.size(3) <= 1 || view.stride(3) == 1 ? view : view.contiguous();
}

/// The same for one number a token and head: [rows, tokens, heads].
at::Tensor rows_first_lse(const at::Tensor& lse) {
  return lse.dim() == 3 ? lse.transpose(1, 2) : lse.unsqueeze(0);
}

at::Tensor as_given(const at::Tensor& tensor, const at::Tensor& q) {
  return q.dim() == 4 ? tensor.transpose(1, 2) : tensor.squeeze(0);
}

/// [rows, tokens, ...] <-> [tokens, rows, ...].
at::Tensor swapped(const at::Tensor& tensor) {
  return tensor.transpose(0, 1);
}

/// One call: what the plan, the group and the heads have to do with it.
struct Call {
  Group group;
  std::shared_ptr<const Plan> plan;
  int64_t heads, key_heads;

  Call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& layout,
       const std::string& strategy, int64_t head_ranks,
       const std::string& group_name)
      : group(Group::named(group_name)) {
    heads = q.size(1);
    key_heads = k.size(1);
    const int64_t rows = q.dim() == 4 ? q.size(0) : 1;
    plan = plan_for(layout, strategy, static_cast<int>(head_ranks), key_heads,
                    rows, group);
    const int64_t tokens = q.size(q.dim() == 4 ? 2 : 0);
    const int64_t held =
        plan->member_tokens()[static_cast<std::size_t>(plan->member())];
    check(tokens == held, "attend: `q` is ", describe(q), " but rank ",
          group.rank(), " holds ", held, " tokens");
  }

  std::string purpose(const char* what) const {
    return join(plan->strategy().to_string(), " attention ", what);
  }

  AttentionInputs inputs(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const HeadShare& share,
                         double scale, double softcap) const {
    const int64_t group_size = heads / key_heads;
    return {
        .q = q,
        .k = k,
        .v = v,
        .heads_per_key_head = group_size,
        .head_offset = share.heads.begin - share.key_heads.begin * group_size,
        .scale = scale,
        .softcap = softcap};
  }
};

constexpr auto kHeads = HeadTrade::Kind::heads;
constexpr auto kKeyHeads = HeadTrade::Kind::key_heads;

/// Zeroed memory in the order of the caller's tensor, seen rows first.
PartialAttention running_for(const at::Tensor& q, int64_t tokens, int64_t heads,
                             int64_t value_dim) {
  const auto options = q.options().dtype(accumulation_type(q.scalar_type()));
  if (q.dim() == 3) {
    return PartialAttention::nothing({1, tokens, heads}, value_dim, options);
  }
  PartialAttention made =
      PartialAttention::nothing({q.size(0), heads, tokens}, value_dim, options);
  return {made.out.transpose(1, 2), made.lse.transpose(1, 2)};
}

Tensors2 attend_forward(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const OptionalTensor& sink,
                        const at::Tensor& layout, double scale, double softcap,
                        const std::string& strategy, int64_t head_ranks,
                        const std::string& group_name) {
  check_shapes(q, k, v, sink, scale, softcap);
  const Call call(q, k, layout, strategy, head_ranks, group_name);
  const HeadTrade trade(*call.plan, call.group, call.heads, call.key_heads);
  const at::Tensor q_in = rows_first(q), k_in = rows_first(k),
                   v_in = rows_first(v);
  if (!trade.is_needed()) {
    PartialAttention running =
        running_for(q, q_in.size(1), call.heads, v_in.size(3));
    run_forward(*call.plan, call.group,
                call.inputs(q_in, k_in, v_in, trade.mine(), scale, softcap),
                running);
    const at::Tensor out = sink ? running.with_sink(*sink) : running.out;
    return {as_given(out.to(q.scalar_type()), q).contiguous(),
            as_given(running.lse, q).contiguous()};
  }
  const auto traded = trade.to_heads({{swapped(q_in), kHeads},
                                      {swapped(k_in), kKeyHeads},
                                      {swapped(v_in), kKeyHeads}},
                                     call.purpose("forward, trade of heads"));
  const at::Tensor mine = swapped(traded[0]);
  PartialAttention running = PartialAttention::nothing(
      mine.sizes().slice(0, 3), v_in.size(3),
      q.options().dtype(accumulation_type(q.scalar_type())));
  run_forward(*call.plan, call.group,
              call.inputs(mine, swapped(traded[1]), swapped(traded[2]),
                          trade.mine(), scale, softcap),
              running);
  const TokenRange share = trade.mine().heads;
  const at::Tensor out =
      (sink ? running.with_sink(sink->narrow(0, share.begin, share.size()))
            : running.out)
          .to(q.scalar_type());
  const auto back = trade.to_tokens({{swapped(out), kHeads}},
                                    call.purpose("forward, outputs"));
  const auto lse =
      trade.to_tokens({{swapped(running.lse).unsqueeze(3), kHeads}},
                      call.purpose("forward, log-sum-exp"));
  const auto given = [&](const at::Tensor& tensor) {
    return as_given(swapped(tensor), q).contiguous();
  };
  return {given(back[0]), given(lse[0].squeeze(3))};
}

Tensors4 attend_backward(const at::Tensor& dout, const at::Tensor& q,
                         const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& sink, const at::Tensor& out,
                         const at::Tensor& lse, const at::Tensor& layout,
                         double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group_name) {
  check_shapes(q, k, v, sink, scale, softcap);
  const Call call(q, k, layout, strategy, head_ranks, group_name);
  const HeadTrade trade(*call.plan, call.group, call.heads, call.key_heads);
  const auto sums = accumulation_type(q.scalar_type());
  const at::Tensor q_in = rows_first(q), k_in = rows_first(k),
                   v_in = rows_first(v),
                   dout_in = rows_first(dout.to(q.scalar_type()));
  at::Tensor whole = rows_first_lse(lse);
  const at::Tensor saw_nothing = at::isneginf(whole);
  const at::Tensor delta = (rows_first(out).to(sums) * dout_in.to(sums))
                               .sum(3)
                               .masked_fill_(saw_nothing, 0);
  at::Tensor dsink;
  if (sink) {
    const at::Tensor logit = sink->to(sums);
    dsink = (logit - whole)
                .sigmoid()
                .mul_(delta)
                .masked_fill_(saw_nothing, 0)
                .sum({0, 1})
                .neg_()
                .to(sink->scalar_type());
    whole = at::logaddexp(whole, logit);
  } else {
    dsink = at::empty({0}, q.options());
  }
  AttentionGradients gradients;
  gradients.dout = dout_in;
  gradients.lse = whole;
  gradients.delta = delta;
  if (!trade.is_needed()) {
    gradients.dq = at::zeros_like(q, q.options().dtype(sums),
                                  at::MemoryFormat::Contiguous);
    gradients.dq =
        q.dim() == 4 ? gradients.dq.transpose(1, 2) : gradients.dq.unsqueeze(0);
    run_backward(*call.plan, call.group,
                 call.inputs(q_in, k_in, v_in, trade.mine(), scale, softcap),
                 gradients);
  } else {
    const auto traded =
        trade.to_heads({{swapped(q_in), kHeads},
                        {swapped(k_in), kKeyHeads},
                        {swapped(v_in), kKeyHeads},
                        {swapped(dout_in), kHeads}},
                       call.purpose("backward, trade of heads"));
    const auto facts = trade.to_heads({{swapped(whole).unsqueeze(3), kHeads},
                                       {swapped(delta).unsqueeze(3), kHeads}},
                                      call.purpose("backward, row sums"));
    const at::Tensor mine = swapped(traded[0]);
    gradients.dout = swapped(traded[3]);
    gradients.lse = swapped(facts[0].squeeze(3));
    gradients.delta = swapped(facts[1].squeeze(3));
    gradients.dq = at::zeros(mine.sizes(), mine.options().dtype(sums));
    run_backward(*call.plan, call.group,
                 call.inputs(mine, swapped(traded[1]), swapped(traded[2]),
                             trade.mine(), scale, softcap),
                 gradients);
    const auto queries =
        trade.to_tokens({{swapped(gradients.dq).to(q.scalar_type()), kHeads}},
                        call.purpose("backward, dq"));
    const auto keys = trade.to_tokens({{swapped(gradients.dk), kKeyHeads},
                                       {swapped(gradients.dv), kKeyHeads}},
                                      call.purpose("backward, dk and dv"));
    gradients.dq = swapped(queries[0]);
    gradients.dk = swapped(keys[0]);
    gradients.dv = swapped(keys[1]);
  }
  const auto given = [&](const at::Tensor& tensor) {
    return as_given(tensor, q).to(q.scalar_type()).contiguous();
  };
  return {given(gradients.dq), given(gradients.dk), given(gradients.dv), dsink};
}

Tensors2 attend_meta(const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, const OptionalTensor& sink,
                     const at::Tensor& /*layout*/, double scale, double softcap,
                     const std::string& /*strategy*/, int64_t /*head_ranks*/,
                     const std::string& /*group*/) {
  check_shapes(q, k, v, sink, scale, softcap);
  auto sizes = q.sym_sizes().vec();
  const auto options = q.options().dtype(accumulation_type(q.scalar_type()));
  const auto without_channels =
      c10::SymIntArrayRef(sizes).slice(0, sizes.size() - 1).vec();
  sizes.back() = v.sym_size(-1);
  return {at::empty_symint(sizes, q.options()),
          at::empty_symint(without_channels, options)};
}

Tensors4 attend_backward_meta(
    const at::Tensor& /*dout*/, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& sink, const at::Tensor& /*out*/,
    const at::Tensor& /*lse*/, const at::Tensor& /*layout*/, double /*scale*/,
    double /*softcap*/, const std::string& /*strategy*/, int64_t /*head_ranks*/,
    const std::string& /*group*/) {
  const auto like = [](const at::Tensor& tensor) {
    return at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  return {like(q), like(k), like(v),
          sink ? like(*sink) : at::empty({0}, q.options())};
}

const auto& forward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("longspan::attend", "")
                             .typed<decltype(attend_forward)>();
  return op;
}

const auto& backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("longspan::attend_backward", "")
                             .typed<decltype(attend_backward)>();
  return op;
}

class AttendFunction : public torch::autograd::Function<AttendFunction> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& q,
      const at::Tensor& k, const at::Tensor& v, const OptionalTensor& sink,
      const at::Tensor& layout, double scale, double softcap,
      const std::string& strategy, int64_t head_ranks,
      const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = forward_op().call(q, k, v, sink, layout, scale, softcap,
                                        strategy, head_ranks, group);
    ctx->save_for_backward(
        {q, k, v, sink.value_or(at::Tensor()), out, lse, layout});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["strategy"] = strategy;
    ctx->saved_data["head_ranks"] = head_ranks;
    ctx->saved_data["group"] = group;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const OptionalTensor sink =
        saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
    auto [dq, dk, dv, dsink] = backward_op().call(
        grads[0], saved[0], saved[1], saved[2], sink, saved[4], saved[5],
        saved[6], data.at("scale").toDouble(), data.at("softcap").toDouble(),
        data.at("strategy").toStringRef(), data.at("head_ranks").toInt(),
        data.at("group").toStringRef());
    return {dq, dk, dv, sink ? dsink : at::Tensor(), {}, {}, {}, {}, {}, {}};
  }
};

Tensors2 attend_autograd(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const OptionalTensor& sink,
                         const at::Tensor& layout, double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group) {
  const auto results = AttendFunction::apply(
      q, k, v, sink, layout, scale, softcap, strategy, head_ranks, group);
  return {results[0], results[1]};
}

Tensors4 attend_backward_autograd(const at::Tensor& dout, const at::Tensor& q,
                                  const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& sink,
                                  const at::Tensor& out, const at::Tensor& lse,
                                  const at::Tensor& layout, double scale,
                                  double softcap, const std::string& strategy,
                                  int64_t head_ranks,
                                  const std::string& group) {
  const auto wants = [](const at::Tensor& t) { return t.requires_grad(); };
  check(!at::GradMode::is_enabled() || !(wants(dout) || wants(q) || wants(k) ||
                                         wants(v) || (sink && wants(*sink))),
        "attend: there is no second derivative; call backward without "
        "create_graph");
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward_op().call(dout, q, k, v, sink, out, lse, layout, scale,
                            softcap, strategy, head_ranks, group);
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensors2 attend_autocast(const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const OptionalTensor& sink,
                         const at::Tensor& layout, double scale, double softcap,
                         const std::string& strategy, int64_t head_ranks,
                         const std::string& group) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  return forward_op().call(cast(q), cast(k), cast(v), sink, layout, scale,
                           softcap, strategy, head_ranks, group);
}

}  // namespace

at::Tensor layout_tensor(const AttentionLayout& layout) {
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
  auto [out, lse] = forward_op().call(
      q, k, v,
      options.sink.defined() ? OptionalTensor(options.sink) : std::nullopt,
      layout_tensor(layout), scale, options.softcap, options.strategy,
      options.head_ranks, group.name());
  return {out, lse};
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor layout, "
      "float scale, float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, "
      "Tensor? sink, Tensor out, Tensor lse, Tensor layout, float scale, "
      "float softcap, str strategy, int head_ranks, str group) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl("attend", attend_meta);
  m.impl("attend_backward", attend_backward_meta);
}
TORCH_LIBRARY_IMPL(longspan, CPU, m) {
  m.impl("attend", attend_forward);
  m.impl("attend_backward", attend_backward);
}
TORCH_LIBRARY_IMPL(longspan, CUDA, m) {
  m.impl("attend", attend_forward);
  m.impl("attend_backward", attend_backward);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl("attend", attend_autograd);
  m.impl("attend_backward", attend_backward_autograd);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCPU, m) {
  m.impl("attend", attend_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(longspan, AutocastCUDA, m) {
  m.impl("attend", attend_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace longspan
