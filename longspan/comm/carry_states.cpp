#include "longspan/comm/carry_states.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <span>
#include <vector>

#include "longspan/comm/agree.h"
#include "longspan/comm/detail/call.h"
#include "longspan/comm/detail/carry.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/gradient_flow.h"

namespace longspan {

namespace {

constexpr const char* kWho = "carry_states";

struct Send {
  int64_t from = 0, to = 0, run = 0, transition = 0;
};
struct Step {
  int64_t gives = 0, state = 0, transition = 0;
};

/// The rows of a table of plain numbers.
template <class Row>
class Table {
 public:
  static constexpr int64_t kColumns = sizeof(Row) / sizeof(int64_t);

  Table(const char* name, const at::Tensor& table)
      : table_(table.contiguous()) {
    check(table.device().is_cpu(), kWho, ": `", name, "` is on ",
          table.device().str(), "; it is plain numbers, keep it on the CPU");
    rows_ = {reinterpret_cast<const Row*>(table_.const_data_ptr<int64_t>()),
             static_cast<std::size_t>(table_.size(0))};
  }
  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

 private:
  at::Tensor table_;
  std::span<const Row> rows_;
};

void check_table(const char* name, const at::Tensor& table, int64_t columns) {
  check(table.dim() == 2 && table.sym_size(1) == columns &&
            table.scalar_type() == at::kLong,
        kWho, ": `", name, "` is ", describe(table), "; expected int64 [n, ",
        columns, "]");
}

/// How many axes of its matrices a transition has: 0, 1 or 2.
int64_t axes_of(const at::Tensor& transition, const at::Tensor& state) {
  return transition.dim() - (state.dim() - 2);
}

void check_pair(const at::Tensor& transition, const at::Tensor& state) {
  check(state.is_floating_point() && state.dim() >= 3, kWho, ": `state` is ",
        describe(state), "; expected floating [runs, .., K, V]");
  const auto sizes = state.sym_sizes();
  const std::size_t batch = sizes.size() - 2;
  const int64_t axes = axes_of(transition, state);
  bool fits = transition.is_floating_point() && axes >= 0 && axes <= 2 &&
              transition.device() == state.device();
  for (std::size_t i = 0; fits && i < transition.sym_sizes().size(); ++i) {
    fits = transition.sym_sizes()[i] == sizes[std::min(i, batch)];
  }
  check(fits, kWho, ": `transition` is ", describe(transition), " and `state` ",
        describe(state),
        "; expected [runs, ..], [runs, .., K] or [runs, .., K, K] for a state "
        "of [runs, .., K, V] beside it");
}

at::ScalarType sum_type(const at::Tensor& transition, const at::Tensor& state) {
  const bool wide = transition.scalar_type() == at::kDouble ||
                    state.scalar_type() == at::kDouble;
  return wide ? at::kDouble : at::kFloat;
}

/// transition * state, for one run or for all.
at::Tensor applied(const at::Tensor& transition, const at::Tensor& state,
                   int64_t axes) {
  if (axes == 2) return at::matmul(transition, state);
  if (axes == 1) return transition.unsqueeze(-1) * state;
  return transition.unsqueeze(-1).unsqueeze(-1) * state;
}

/// What comes from others: rows behind this rank's own.
struct Delivery {
  std::vector<Piece> states, transitions;
  int64_t received_states = 0, received_transitions = 0;
};

Delivery delivery_of(const Table<Send>& sends, int64_t runs,
                     const Group& group) {
  Delivery found;
  const int64_t me = group.rank();
  std::vector<Send> mine;
  for (const Send& send : sends) {
    check(send.from >= 0 && send.from < group.size() && send.to >= 0 &&
              send.to < group.size() && send.from != send.to && send.run >= 0 &&
              (send.transition == 0 || send.transition == 1),
          kWho, ": `sends` has the row (", send.from, ", ", send.to, ", ",
          send.run, ", ", send.transition, ") in a group of ", group.size());
    if (send.from != me && send.to != me) continue;
    check(send.from != me || send.run < runs, kWho, ": `sends` names run ",
          send.run, " of rank ", me, ", which has ", runs);
    mine.push_back(send);
  }
  std::ranges::stable_sort(mine, {}, &Send::from);
  for (const Send& send : mine) {
    const auto add = [&](std::vector<Piece>& pieces, int64_t& received) {
      Part target = {0, 0, 1};
      if (send.to == me) target.begin = received++;
      pieces.push_back({static_cast<int>(send.from),
                        static_cast<int>(send.to),
                        {0, send.run, 1},
                        target});
    };
    add(found.states, found.received_states);
    if (send.transition != 0) {
      add(found.transitions, found.received_transitions);
    }
  }
  return found;
}

std::vector<int64_t> with_rows(const at::Tensor& x, int64_t rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

/// A row of a rank's own, or of what came.
at::Tensor row_of(const at::Tensor& own, const at::Tensor& came,
                  int64_t place) {
  const int64_t here = own.size(0);
  return place < here ? own.select(0, place) : came.select(0, place - here);
}

at::Tensor folded(const std::vector<at::Tensor>& own,
                  const std::vector<at::Tensor>& came,
                  const Table<Step>& steps) {
  const at::Tensor& state = own[0];
  const int64_t axes = axes_of(own[1], state);
  const int64_t states = state.size(0) + came[0].size(0);
  const int64_t transitions = own[1].size(0) + came[1].size(0);
  at::Tensor out = at::zeros_like(state);
  at::Tensor at_hand;
  for (const Step& step : steps) {
    check(step.gives >= -1 && step.gives < state.size(0) && step.state >= -1 &&
              step.state < states && step.transition >= -1 &&
              step.transition < transitions,
          kWho, ": `steps` has the row (", step.gives, ", ", step.state, ", ",
          step.transition, ") with ", state.size(0), " runs here, ", states,
          " states and ", transitions, " transitions");
    if (step.gives >= 0 && at_hand.defined()) {
      out.select(0, step.gives).copy_(at_hand);
    }
    if (step.state < 0) {
      at_hand = at::Tensor();  // of the next document nothing is known yet
      continue;
    }
    const at::Tensor added = row_of(own[0], came[0], step.state);
    at_hand =
        step.transition < 0 || !at_hand.defined()
            ? added
            : applied(row_of(own[1], came[1], step.transition), at_hand, axes) +
                  added;
  }
  return out;
}

using Carry = at::Tensor(const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&,
                         std::string_view);

at::Tensor call(const at::Tensor& transition, const at::Tensor& state,
                const at::Tensor& sends, const at::Tensor& steps,
                const at::Tensor& back_sends, const at::Tensor& back_steps,
                std::string_view group) {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("longspan::carry_states", "")
                                .typed<Carry>();
  return found.call(transition, state, sends, steps, back_sends, back_steps,
                    group);
}

void check_tables(const at::Tensor& sends, const at::Tensor& steps,
                  const at::Tensor& back_sends, const at::Tensor& back_steps) {
  check_table("sends", sends, Table<Send>::kColumns);
  check_table("steps", steps, Table<Step>::kColumns);
  check_table("back_sends", back_sends, Table<Send>::kColumns);
  check_table("back_steps", back_steps, Table<Step>::kColumns);
}

at::Tensor carry_meta(const at::Tensor& transition, const at::Tensor& state,
                      const at::Tensor& sends, const at::Tensor& steps,
                      const at::Tensor& back_sends,
                      const at::Tensor& back_steps,
                      std::string_view /*group*/) {
  check_pair(transition, state);
  check_tables(sends, steps, back_sends, back_steps);
  return at::empty_symint(state.sym_sizes(),
                          state.options().dtype(sum_type(transition, state)));
}

at::Tensor carry_here(const at::Tensor& transition, const at::Tensor& state,
                      const at::Tensor& sends, const at::Tensor& steps,
                      const at::Tensor& back_sends,
                      const at::Tensor& back_steps, std::string_view name) {
  const Group group = Group::named(std::string(name));
  return as_call(group, kWho, [&](CallScope& scope) {
    check_pair(transition, state);
    check_tables(sends, steps, back_sends, back_steps);
    const Table<Send> leaving("sends", sends);
    const Table<Step> folds("steps", steps);
    const Delivery delivery = delivery_of(leaving, state.size(0), group);
    scope.begin([&] {
      return join(facts_of(transition, {0}), "; ", facts_of(state, {0}),
                  "; table ", hash_of(sends), gradient_facts());
    });
    const auto type = sum_type(transition, state);
    const std::vector<at::Tensor> own = {state.to(type).contiguous(),
                                         transition.to(type).contiguous()};
    std::vector<at::Tensor> came = {
        at::empty(with_rows(own[0], 0), own[0].options()),
        at::empty(with_rows(own[1], 0), own[1].options())};
    // A table that is empty is so on all ranks.
    if (sends.size(0) > 0) {
      came = carry(
          {{.x = own[0],
            .pieces = delivery.states,
            .target_sizes = with_rows(own[0], delivery.received_states)},
           {.x = own[1],
            .pieces = delivery.transitions,
            .target_sizes = with_rows(own[1], delivery.received_transitions)}},
          group, {.purpose = kWho});
    }
    return folded(own, came, folds);
  });
}

/// Sums a product over the axes that a transition does not have.
at::Tensor worth_of(const at::Tensor& grad, const at::Tensor& incoming,
                    int64_t axes) {
  if (axes == 2) return at::matmul(grad, incoming.transpose(-1, -2));
  if (axes == 1) return (grad * incoming).sum(-1);
  return (grad * incoming).sum({-2, -1});
}

class CarryStates : public torch::autograd::Function<CarryStates> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& transition,
                            const at::Tensor& state, const at::Tensor& sends,
                            const at::Tensor& steps,
                            const at::Tensor& back_sends,
                            const at::Tensor& back_steps,
                            const std::string& group) {
    at::Tensor incoming;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      incoming =
          call(transition, state, sends, steps, back_sends, back_steps, group);
    }
    ctx->save_for_backward(
        {transition, incoming, sends, steps, back_sends, back_steps});
    ctx->saved_data["group"] = group;
    ctx->saved_data["state"] = state.scalar_type();
    return incoming;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &transition = saved[0], &incoming = saved[1];
    const int64_t axes = axes_of(transition, incoming);
    // Documents are read from their ends, so the tables change places.
    const at::Tensor grad =
        call(axes == 2 ? transition.transpose(-1, -2) : transition, grads[0],
             saved[4], saved[5], saved[2], saved[3],
             ctx->saved_data["group"].toStringRef());
    torch::autograd::variable_list found(7);
    found[0] = worth_of(grad, incoming, axes).to(transition.scalar_type());
    found[1] = grad.to(ctx->saved_data["state"].toScalarType());
    return found;
  }
};

at::Tensor carry_autograd(const at::Tensor& transition, const at::Tensor& state,
                          const at::Tensor& sends, const at::Tensor& steps,
                          const at::Tensor& back_sends,
                          const at::Tensor& back_steps,
                          std::string_view group) {
  const bool asks = at::GradMode::is_enabled() &&
                    (transition.requires_grad() || state.requires_grad());
  refuse_transforms(kWho);
  if (has_tangent(transition) || has_tangent(state)) refuse_forward_mode(kWho);
  const GradientFlow flow(asks);
  if (!asks) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call(transition, state, sends, steps, back_sends, back_steps, group);
  }
  return CarryStates::apply(transition, state, sends, steps, back_sends,
                            back_steps, std::string(group));
}

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  m.def(
      "carry_states(Tensor transition, Tensor state, Tensor sends, "
      "Tensor steps, Tensor back_sends, Tensor back_steps, str group) -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(longspan, Meta, m) {
  m.impl(kWho, carry_meta);
}
TORCH_LIBRARY_IMPL(longspan, CompositeExplicitAutograd, m) {
  m.impl(kWho, carry_here);
}
TORCH_LIBRARY_IMPL(longspan, Autograd, m) {
  m.impl(kWho, carry_autograd);
}

}  // namespace

at::Tensor carry_states(const at::Tensor& transition, const at::Tensor& state,
                        const StateTables& tables, const Group& group) {
  return call(transition, state, tables.sends, tables.steps, tables.back_sends,
              tables.back_steps, group.name());
}

}  // namespace longspan
