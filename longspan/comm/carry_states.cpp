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

// Rows of the tables, as a StatePlan has them.
struct Send {
  int64_t round = 0, from = 0, to = 0, place = 0, transition = 0;
};
struct Step {
  int64_t round = 0, gives = 0, keeps = 0, place = 0, transition = 0;
};
/// More rounds than any number of runs has.
constexpr int64_t kMostRounds = 64;

/// The rows of a table of plain numbers.
template <class Row>
class Table {
 public:
  static constexpr int64_t kColumns = sizeof(Row) / sizeof(int64_t);

  Table(const char* name, const at::Tensor& table)
      : table_(table.contiguous()) {
    check(table.device().is_cpu(), kWho, ": `", name, "` is on ",
          table.device(), "; it is plain numbers, keep it on the CPU");
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

/// transition * before, of two of them.
at::Tensor combined(const at::Tensor& transition, const at::Tensor& before,
                    int64_t axes) {
  return axes == 2 ? at::matmul(transition, before) : transition * before;
}

std::vector<int64_t> with_rows(const at::Tensor& x, int64_t rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

/// The tables of one rank, round by round: before(round's sends of this rank,
/// whether anybody sends), then each(step).
template <class Before, class Each>
void for_rounds(const Table<Send>& sends, const Table<Step>& steps, int me,
                const Before& before, const Each& each) {
  auto send = sends.begin();
  auto step = steps.begin();
  while (send != sends.end() || step != steps.end()) {
    const int64_t round =
        std::min(send == sends.end() ? kMostRounds : send->round,
                 step == steps.end() ? kMostRounds : step->round);
    const auto first = send;
    std::vector<Send> mine;
    for (; send != sends.end() && send->round == round; ++send) {
      if (send->from == me || send->to == me) mine.push_back(*send);
    }
    std::ranges::stable_sort(mine, {}, &Send::from);
    before(mine, send != first);
    for (; step != steps.end() && step->round == round; ++step) each(*step);
  }
}

/// Every number means something, before anything is sent.
void check_program(const Table<Send>& sends, const Table<Step>& steps,
                   int64_t runs, const Group& group) {
  const auto is_flag = [](int64_t x) { return x == 0 || x == 1; };
  int64_t last = 0;
  for (const auto& [round, from, to, place, transition] : sends) {
    check(round >= last && round < kMostRounds && from >= 0 &&
              from < group.size() && to >= 0 && to < group.size() &&
              from != to && place >= 0 && is_flag(transition),
          kWho, ": `sends` has the row (", round, ", ", from, ", ", to, ", ",
          place, ", ", transition, ") in a group of ", group.size(),
          ", after round ", last);
    last = round;
  }
  last = 0;
  for (const auto& [round, gives, keeps, place, transition] : steps) {
    check(round >= last && round < kMostRounds && gives >= -1 && gives < runs &&
              is_flag(keeps) && place >= -1 && is_flag(transition),
          kWho, ": `steps` has the row (", round, ", ", gives, ", ", keeps,
          ", ", place, ", ", transition, ") with ", runs,
          " runs here, after round ", last);
    last = round;
  }
  // Whether the pair at each place has a transition.
  std::vector<bool> places(static_cast<std::size_t>(runs), true);
  bool at_hand = false, begun = false;  // and whether it begins a document
  const auto check_place = [&](const char* table, int64_t place,
                               int64_t transition) {
    const auto at = static_cast<std::size_t>(place);
    check(at < places.size() && (transition == 0 || places[at]), kWho, ": `",
          table, "` names place ", place,
          transition == 0 ? "" : " with its transition", " of rank ",
          group.rank(), ", which has ", runs, " runs and ", places.size(),
          " places by then");
  };
  for_rounds(
      sends, steps, group.rank(),
      [&](const std::vector<Send>& mine, bool) {
        for (const Send& send : mine) {
          if (send.from != group.rank()) continue;
          check_place("sends", send.place, send.transition);
        }
        for (const Send& send : mine) {
          if (send.to == group.rank()) places.push_back(send.transition != 0);
        }
      },
      [&](const Step& step) {
        if (step.keeps != 0) {
          check(at_hand, kWho, ": `steps` keeps a pair with nothing at hand");
          places.push_back(!begun);
        }
        if (step.place >= 0) {
          check_place("steps", step.place, step.transition);
          begun = step.transition == 0 || (at_hand && begun);
        }
        at_hand = step.place >= 0;
      });
}

/// One transition and one state. Without a transition it begins a document.
struct Pair {
  at::Tensor transition, state;
};

/// The pairs of this rank, and what is made of them round by round.
class Folding {
 public:
  Folding(const at::Tensor& transition, const at::Tensor& state)
      : own_{state, transition},
        axes_(axes_of(transition, state)),
        out_(at::zeros_like(state)) {
    for (int64_t i = 0; i < state.size(0); ++i) {
      places_.push_back({transition.select(0, i), state.select(0, i)});
    }
  }

  /// `sends` are those of one round, to this rank or from it, by sender.
  void exchange(const std::vector<Send>& sends, const Group& group) {
    const int me = group.rank();
    std::vector<at::Tensor> leaving = own_;
    std::vector<at::Tensor> rows[2];
    const auto is_own = [&](const Send& send) {
      return send.from != me || send.place < own_[0].size(0);
    };
    const bool as_they_lie = std::ranges::all_of(sends, is_own);
    std::vector<Piece> pieces[2];
    int64_t received[2] = {};
    std::vector<bool> with_transition;
    for (const Send& send : sends) {
      for (int part = 0; part <= send.transition; ++part) {
        Part source = {0, send.place, 1}, target = {0, 0, 1};
        if (send.from == me && !as_they_lie) {
          const Pair& pair = place_of(send.place);
          source.begin = std::ssize(rows[part]);
          rows[part].push_back(part == 0 ? pair.state : pair.transition);
        }
        if (send.to == me) target.begin = received[part]++;
        pieces[part].push_back({static_cast<int>(send.from),
                                static_cast<int>(send.to), source, target});
      }
      if (send.to == me) with_transition.push_back(send.transition != 0);
    }
    for (int part = 0; part < 2; ++part) {
      if (!rows[part].empty()) leaving[part] = at::stack(rows[part]);
    }
    const auto came = carry({{.x = leaving[0],
                              .pieces = pieces[0],
                              .target_sizes = with_rows(own_[0], received[0])},
                             {.x = leaving[1],
                              .pieces = pieces[1],
                              .target_sizes = with_rows(own_[1], received[1])}},
                            group, {.purpose = kWho});
    int64_t transitions = 0;
    for (int64_t i = 0; i < received[0]; ++i) {
      Pair& pair = places_.emplace_back();
      pair.state = came[0].select(0, i);
      if (with_transition[static_cast<std::size_t>(i)]) {
        pair.transition = came[1].select(0, transitions++);
      }
    }
  }

  void take(const Step& step) {
    if (step.gives >= 0 && at_hand_.state.defined()) {
      out_.select(0, step.gives).copy_(at_hand_.state);
    }
    if (step.keeps != 0) places_.push_back(at_hand_);
    if (step.place < 0) {
      at_hand_ = {};  // of the next document nothing is known yet
      return;
    }
    Pair next = place_of(step.place);
    if (step.transition == 0) next.transition = at::Tensor();
    if (at_hand_.state.defined() && next.transition.defined()) {
      next.state = applied(next.transition, at_hand_.state, axes_) + next.state;
      next.transition =
          at_hand_.transition.defined()
              ? combined(next.transition, at_hand_.transition, axes_)
              : at::Tensor();
    }
    at_hand_ = std::move(next);
  }

  const at::Tensor& incoming() const { return out_; }

 private:
  const Pair& place_of(int64_t place) const {
    return places_[static_cast<std::size_t>(place)];
  }

  std::vector<at::Tensor> own_;  // states, transitions
  int64_t axes_;
  at::Tensor out_;
  std::vector<Pair> places_;
  Pair at_hand_;
};

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
    check_program(leaving, folds, state.size(0), group);
    scope.begin([&] {
      return join(facts_of(transition, {0}), "; ", facts_of(state, {0}),
                  "; table ", hash_of(sends), gradient_facts());
    });
    const auto type = sum_type(transition, state);
    Folding folding(transition.to(type).contiguous(),
                    state.to(type).contiguous());
    for_rounds(
        leaving, folds, group.rank(),
        [&](const std::vector<Send>& mine, bool anybody_sends) {
          // Then every rank takes part.
          if (anybody_sends) folding.exchange(mine, group);
        },
        [&](const Step& step) { folding.take(step); });
    return folding.incoming();
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
