#include "longspan/attention/run.h"

#include <ATen/ATen.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/head_trade.h"
#include "longspan/attention/passes.h"
#include "longspan/core/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

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
    check(head_ranks == static_cast<int>(head_ranks), "attend: head_ranks is ",
          head_ranks, "; it must divide the ", group.size(), " ranks");
    plan = plan_for(layout, strategy, static_cast<int>(head_ranks), key_heads,
                    rows, group);
    const int64_t tokens = q.size(q.dim() == 4 ? 2 : 0);
    const int64_t held =
        plan->member_tokens()[static_cast<std::size_t>(plan->member())];
    check(tokens == held, "attend: `q` is ", describe(q), " but rank ",
          group.rank(), " holds ", held, " tokens");
  }

  std::string purpose(const char* what) const {
    return join(plan->strategy().name(plan->ranks()), " attention ", what);
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

/// Sum over channels of out * dout, 0 where a query saw nothing.
at::Tensor row_sums(const at::Tensor& out, const at::Tensor& dout,
                    const at::Tensor& saw_nothing) {
  const auto sums = accumulation_type(out.scalar_type());
  return (out.to(sums) * dout.to(sums)).sum(3).masked_fill_(saw_nothing, 0);
}

}  // namespace

at::Tensor rows_first(const at::Tensor& tensor) {
  const at::Tensor view =
      tensor.dim() == 4 ? tensor.transpose(1, 2) : tensor.unsqueeze(0);
  return view.size(3) <= 1 || view.stride(3) == 1 ? view : view.contiguous();
}

Tensors2 attend_forward(const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const OptionalTensor& sink,
                        const at::Tensor& layout, double scale, double softcap,
                        const std::string& strategy, int64_t head_ranks,
                        const std::string& group_name) {
  check_attend(q, k, v, sink, scale, softcap);
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
  check_attend(q, k, v, sink, scale, softcap);
  const Call call(q, k, layout, strategy, head_ranks, group_name);
  const HeadTrade trade(*call.plan, call.group, call.heads, call.key_heads);
  const auto sums = accumulation_type(q.scalar_type());
  const at::Tensor q_in = rows_first(q), k_in = rows_first(k),
                   v_in = rows_first(v), out_in = rows_first(out),
                   dout_in = rows_first(dout.to(q.scalar_type()));
  at::Tensor whole = rows_first_lse(lse);
  const at::Tensor saw_nothing = at::isneginf(whole);
  const at::Tensor delta = row_sums(out_in, dout_in, saw_nothing);
  at::Tensor dsink;
  if (sink) {
    const at::Tensor logit = sink->to(sums);
    dsink = (logit - whole)
                .sigmoid()
                .mul_(delta)
                .masked_fill_(saw_nothing, 0)
                .sum(at::IntArrayRef({0, 1}))
                .neg_()
                .to(sink->scalar_type());
    whole = at::logaddexp(whole, logit);
  } else {
    dsink = at::empty({0}, q.options());
  }
  AttentionGradients gradients;
  gradients.out = out_in;
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
                        {swapped(out_in), kHeads},
                        {swapped(dout_in), kHeads}},
                       call.purpose("backward, trade of heads"));
    const auto facts = trade.to_heads({{swapped(whole).unsqueeze(3), kHeads}},
                                      call.purpose("backward, log-sum-exp"));
    const at::Tensor mine = swapped(traded[0]);
    gradients.out = swapped(traded[3]);
    gradients.dout = swapped(traded[4]);
    gradients.lse = swapped(facts[0].squeeze(3));
    gradients.delta =
        row_sums(gradients.out, gradients.dout, at::isneginf(gradients.lse));
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

}  // namespace longspan
