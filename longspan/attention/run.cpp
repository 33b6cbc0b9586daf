#include "longspan/attention/detail/run.h"

#include <ATen/ATen.h>

#include "longspan/attention/attend.h"
#include "longspan/attention/detail/head_trade.h"
#include "longspan/attention/detail/passes.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_cudnn.h"
#include "longspan/ops/attend_fused.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

/// One number a token and head, as [rows, tokens, heads].
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

/// Something like q, of so many heads and channels, that is added up; in the
/// order of the caller's memory.
Accumulator accumulator(Accumulator::Kind kind, const at::Tensor& q,
                        int64_t tokens, int64_t heads, int64_t channels) {
  const int64_t rows = q.dim() == 4 ? q.size(0) : 1;
  return Accumulator(
      kind, {rows, tokens, heads, channels}, sums_like(q),
      q.dim() == 4 ? MemoryOrder::heads_first : MemoryOrder::tokens_first);
}

/// An accumulator for heads that came by a trade.
Accumulator accumulator(Accumulator::Kind kind, const at::Tensor& like,
                        int64_t channels) {
  return Accumulator(kind, {like.size(0), like.size(1), like.size(2), channels},
                     sums_like(like));
}

/// The tensor with the strides of another, unless their shapes differ.
at::Tensor lying_like(const at::Tensor& other, const at::Tensor& tensor) {
  if (tensor.sizes() != other.sizes() || lie_alike(tensor, other)) {
    return tensor;
  }
  return at::empty_strided(other.sizes(), other.strides(), tensor.options())
      .copy_(tensor);
}

constexpr auto kAttention = Accumulator::Kind::attention;
constexpr auto kSum = Accumulator::Kind::sum;

/// Kernels that can take the sink along are asked to.
void ask_for_sink(Accumulator& running, const OptionalTensor& sink) {
  if (sink && sink->is_cuda()) {
    running.ask_for_sink(sink->to(at::kFloat).contiguous());
  }
}

/// The output in the type of q, and lse.
PartialAttention finished(Accumulator& running, const at::Tensor& q,
                          const OptionalTensor& sink) {
  if (!sink || running.has_sink()) return running.finish(q.scalar_type());
  const PartialAttention all =
      running.finish(accumulation_type(q.scalar_type()));
  return {all.with_sink(*sink).to(q.scalar_type()), all.lse};
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
    Accumulator running =
        accumulator(kAttention, q, q_in.size(1), call.heads, v_in.size(3));
    ask_for_sink(running, sink);
    run_forward(*call.plan, call.group,
                call.inputs(q_in, k_in, v_in, trade.mine(), scale, softcap),
                running);
    const auto [out, lse] = finished(running, q, sink);
    return {as_given(out, q).contiguous(), as_given(lse, q).contiguous()};
  }
  const auto traded = trade.to_heads({{swapped(q_in), kHeads},
                                      {swapped(k_in), kKeyHeads},
                                      {swapped(v_in), kKeyHeads}},
                                     call.purpose("forward, trade of heads"));
  const at::Tensor mine = swapped(traded[0]);
  const TokenRange share = trade.mine().heads;
  const OptionalTensor my_sink =
      sink ? OptionalTensor(sink->narrow(0, share.begin, share.size())) : sink;
  Accumulator running = accumulator(kAttention, mine, v_in.size(3));
  ask_for_sink(running, my_sink);
  run_forward(*call.plan, call.group,
              call.inputs(mine, swapped(traded[1]), swapped(traded[2]),
                          trade.mine(), scale, softcap),
              running);
  const auto [out, lse_mine] = finished(running, q, my_sink);
  const auto back = trade.to_tokens({{swapped(out), kHeads}},
                                    call.purpose("forward, outputs"));
  const auto lse = trade.to_tokens({{swapped(lse_mine).unsqueeze(3), kHeads}},
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
  AttentionAnswer answer{
      .out = out_in, .dout = dout_in, .lse = rows_first_lse(lse)};
  at::Tensor dsink = at::empty({0}, q.options());
  if (sink) {
    const at::Tensor logit = sink->to(sums);
    dsink = (logit - answer.lse)
                .sigmoid()
                .mul_(answer.delta())
                .masked_fill_(at::isneginf(answer.lse), 0)
                .sum(at::IntArrayRef({0, 1}))
                .neg_()
                .to(sink->scalar_type());
    answer.lse = at::logaddexp(answer.lse, logit);
  }
  at::Tensor dq, dk, dv;
  if (!trade.is_needed()) {
    const auto sum = [&](const at::Tensor& like) {
      return accumulator(kSum, q, like.size(1), like.size(2), like.size(3));
    };
    Accumulator dq_sum = sum(q_in), dk_sum = sum(k_in), dv_sum = sum(v_in);
    AttentionGradients gradients{dq_sum, dk_sum, dv_sum};
    AttentionInputs inputs =
        call.inputs(q_in, k_in, v_in, trade.mine(), scale, softcap);
    const bool by_cudnn =
        inputs.q.is_cuda() && !call.plan->steps().empty() &&
        !FusedChoice::of_backward(inputs, call.plan->steps()[0].lines,
                                  call.plan->steps().size() == 1)
             .cudnn.empty();
    if (by_cudnn) {
      // It wants these to lie alike: once here, not in every step.
      inputs.q = lying_like(answer.out, inputs.q);
      answer.dout = lying_like(answer.out, answer.dout);
    }
    run_backward(*call.plan, call.group, inputs, answer, gradients);
    dq = dq_sum.finish(q.scalar_type()).out;
    dk = dk_sum.finish(q.scalar_type()).out;
    dv = dv_sum.finish(q.scalar_type()).out;
  } else {
    const auto traded =
        trade.to_heads({{swapped(q_in), kHeads},
                        {swapped(k_in), kKeyHeads},
                        {swapped(v_in), kKeyHeads},
                        {swapped(out_in), kHeads},
                        {swapped(dout_in), kHeads}},
                       call.purpose("backward, trade of heads"));
    const auto facts =
        trade.to_heads({{swapped(answer.lse).unsqueeze(3), kHeads}},
                       call.purpose("backward, log-sum-exp"));
    const at::Tensor q_mine = swapped(traded[0]), k_mine = swapped(traded[1]),
                     v_mine = swapped(traded[2]);
    const AttentionAnswer mine{.out = swapped(traded[3]),
                               .dout = swapped(traded[4]),
                               .lse = swapped(facts[0].squeeze(3))};
    Accumulator dq_sum = accumulator(kSum, q_mine, q_mine.size(3)),
                dk_sum = accumulator(kSum, k_mine, k_mine.size(3)),
                dv_sum = accumulator(kSum, v_mine, v_mine.size(3));
    AttentionGradients gradients{dq_sum, dk_sum, dv_sum};
    run_backward(
        *call.plan, call.group,
        call.inputs(q_mine, k_mine, v_mine, trade.mine(), scale, softcap), mine,
        gradients);
    const auto queries =
        trade.to_tokens({{swapped(dq_sum.finish(q.scalar_type()).out), kHeads}},
                        call.purpose("backward, dq"));
    const auto keys =
        trade.to_tokens({{swapped(dk_sum.finish(sums).out), kKeyHeads},
                         {swapped(dv_sum.finish(sums).out), kKeyHeads}},
                        call.purpose("backward, dk and dv"));
    dq = swapped(queries[0]);
    dk = swapped(keys[0]);
    dv = swapped(keys[1]);
  }
  const auto given = [&](const at::Tensor& tensor) {
    return as_given(tensor, q).to(q.scalar_type()).contiguous();
  };
  return {given(dq), given(dk), given(dv), dsink};
}

}  // namespace longspan
