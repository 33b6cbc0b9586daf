#include "longspan/attention/detail/passes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "longspan/comm/detail/exchange.h"
#include "longspan/core/detail/check.h"
#include "longspan/ops/fold.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/token_arrays.h"

namespace longspan {

namespace {

/// Keys and values of some tokens side by side, [tokens, rows, key heads,
/// head_dim + value_dim]: any run of tokens is one contiguous message.
struct KeyBlock {
  at::Tensor both;
  int64_t head_dim = 0;

  static at::Tensor empty(const AttentionInputs& in, int64_t tokens,
                          at::ScalarType dtype) {
    return at::empty(
        {tokens, in.k.size(0), in.k.size(2), in.k.size(3) + in.v.size(3)},
        in.k.options().dtype(dtype));
  }

  at::Tensor keys() const {
    return both.narrow(3, 0, head_dim).transpose(0, 1);
  }
  at::Tensor values() const {
    return both.narrow(3, head_dim, both.size(3) - head_dim).transpose(0, 1);
  }
};

KeyBlock pack_keys(const AttentionInputs& in) {
  KeyBlock block{KeyBlock::empty(in, in.k.size(1), in.k.scalar_type()),
                 in.k.size(3)};
  const auto copy = [](const at::Tensor& from, const at::Tensor& to) {
    // A copy between such strides is slow in torch, and folding one part is
    // one.
    const PlacedPart all{.part = {from, {}}};
    if (!fold_on_device(nullptr, {&all, 1}, {to, {}})) to.copy_(from);
  };
  copy(in.k, block.keys());
  copy(in.v, block.values());
  return block;
}

/// The tokens of a parcel, cut out of an array that holds `held`; a view where
/// they lie together.
at::Tensor cut(const at::Tensor& array, const std::vector<TokenRange>& held,
               const std::vector<TokenRange>& wanted) {
  return join_ranges(array, places_in(held, wanted));
}

/// Where in a step's keys those lie whose gradients go home.
TokenRange places_sent(const PlanStep& step) {
  TokenRange hull{count_tokens(step.keys), 0};
  for (const PlannedParcel& parcel : step.returns) {
    for (TokenRange place : places_in(step.keys, parcel.tokens)) {
      hull.begin = std::min(hull.begin, place.begin);
      hull.end = std::max(hull.end, place.end);
    }
  }
  return hull;
}

/// How many steps there are up to the last one that shows this rank a key.
std::size_t steps_with_keys(const Plan& plan) {
  std::size_t count = plan.steps().size();
  while (count > 0 && plan.steps()[count - 1].lines.empty()) --count;
  return count;
}

bool moves_keys(const Plan& plan) {
  for (const PlanStep& step : plan.steps()) {
    if (!step.sends.empty() || !step.arrivals.empty()) return true;
  }
  return false;
}

/// What a profiler calls one step: "ring 2/8, keys from 3", the rank that sent
/// them.
std::string name_of_step(const Plan& plan, std::size_t i, const char* pass) {
  std::string from = i == 0 ? ", own keys" : ", keys from ";
  if (i > 0) {
    const char* between = "";
    for (const PlannedParcel& parcel : plan.steps()[i - 1].arrivals) {
      from += join(std::exchange(between, ", "), parcel.peer);
    }
  }
  return join(plan.strategy().name(plan.ranks()), " ", i + 1, "/",
              plan.steps().size(), from, pass);
}

/// The keys of one step after another. start_next() starts what this step
/// sends and receives; arrive() waits for it and makes it current.
class KeyFlow {
 public:
  KeyFlow(const Plan& plan, const Group& group, const AttentionInputs& inputs,
          const char* pass)
      : plan_(plan), group_(group), own_(inputs), pass_(pass) {
    if (moves_keys(plan)) held_ = pack_keys(inputs);
  }

  AttentionInputs inputs() const {
    AttentionInputs now = own_;
    if (step_ == 0) return now;
    // A step without keys has none to show.
    now.k = held_.both.defined() ? held_.keys() : own_.k.narrow(1, 0, 0);
    now.v = held_.both.defined() ? held_.values() : own_.v.narrow(1, 0, 0);
    return now;
  }

  void start_next() {
    if (group_.size() == 1) return;  // nobody to send to
    const PlanStep& step = plan_.steps()[step_];
    // The first exchange may connect the ranks, so all of them take part.
    if (step_ > 0 && step.sends.empty() && step.arrivals.empty()) return;
    std::vector<Parcel> sends, receives;
    for (const PlannedParcel& parcel : step.sends) {
      sends.push_back({parcel.peer, cut(held_.both, step.keys, parcel.tokens)});
    }
    int64_t tokens = 0;
    for (const PlannedParcel& parcel : step.arrivals) {
      tokens += count_tokens(parcel.tokens);
    }
    next_ = {KeyBlock::empty(own_, tokens, own_.k.scalar_type()),
             own_.k.size(3)};
    int64_t at = 0;
    for (const PlannedParcel& parcel : step.arrivals) {
      const int64_t count = count_tokens(parcel.tokens);
      receives.push_back({parcel.peer, next_.both.narrow(0, at, count)});
      at += count;
    }
    transfer_ = start_exchange(
        group_, std::move(sends), std::move(receives),
        join(plan_.strategy().name(plan_.ranks()), " attention ", pass_,
             ", keys, hop ", step_ + 1, " of ", std::max(plan_.hops(), 1)),
        plan_.fingerprint(), own_.k.device());
  }

  void arrive() {
    transfer_.wait();
    held_ = std::exchange(next_, {});
    ++step_;
  }

 private:
  const Plan& plan_;
  const Group& group_;
  const AttentionInputs& own_;
  const char* pass_;
  std::size_t step_ = 0;
  KeyBlock held_, next_;
  Transfer transfer_;
};

/// Gradients of other ranks' keys on their way home, and those of ours on
/// their way here.
class Homecoming {
 public:
  /// Our own gradients are added to dk and dv.
  Homecoming(const Plan& plan, const Group& group,
             const AttentionInputs& inputs, AttentionGradients& gradients)
      : plan_(plan), group_(group), inputs_(inputs), gradients_(gradients) {}

  /// Room for the gradients of some keys.
  KeyBlock room_for(int64_t tokens) const {
    const auto sums = accumulation_type(inputs_.k.scalar_type());
    return {KeyBlock::empty(inputs_, tokens, sums), inputs_.k.size(3)};
  }

  /// Sends the gradients that a step found. What an earlier step sent is
  /// received first, so that one block at a time is under way.
  void send(std::size_t i, const at::Tensor& found) {
    receive();
    const PlanStep& step = plan_.steps()[i];
    if (step.returns.empty() && step.homecomings.empty()) return;
    std::vector<Parcel> sends;
    for (const PlannedParcel& parcel : step.returns) {
      sends.push_back({parcel.peer, cut(found, step.keys, parcel.tokens)});
    }
    for (const PlannedParcel& parcel : step.homecomings) {
      coming_.push_back(
          {parcel.peer, room_for(count_tokens(parcel.tokens)).both});
    }
    step_ = &step;
    transfer_ = start_exchange(
        group_, std::move(sends), coming_,
        join(plan_.strategy().name(plan_.ranks()),
             " attention backward, gradients, hop ", i, " of ", plan_.hops()),
        // Another number: keys and gradients of a hop may be as long.
        plan_.fingerprint() ^ 1);
  }

  /// Adds what has come, in the order of the plan.
  void receive() {
    transfer_.wait();
    for (std::size_t i = 0; i < coming_.size(); ++i) {
      int64_t at = 0;
      for (TokenRange place :
           places_in(plan_.steps()[0].keys, step_->homecomings[i].tokens)) {
        const KeyBlock part{coming_[i].tensor.narrow(0, at, place.size()),
                            inputs_.k.size(3)};
        gradients_.dk.add({part.keys(), {}}, 0, place.begin);
        gradients_.dv.add({part.values(), {}}, 0, place.begin);
        at += place.size();
      }
    }
    coming_.clear();
  }

 private:
  const Plan& plan_;
  const Group& group_;
  const AttentionInputs& inputs_;
  AttentionGradients& gradients_;
  const PlanStep* step_ = nullptr;
  std::vector<Parcel> coming_;
  Transfer transfer_;
};

}  // namespace

void run_forward(const Plan& plan, const Group& group,
                 const AttentionInputs& inputs, Accumulator& running) {
  KeyFlow flow(plan, group, inputs, "forward");
  const std::size_t last = steps_with_keys(plan);
  for (std::size_t i = 0; i < plan.steps().size(); ++i) {
    const ProfilerRange range([&] { return name_of_step(plan, i, ""); });
    flow.start_next();
    running.expect_more(i + 1 < last);
    attend_tiles(flow.inputs(), plan.steps()[i].lines, running);
    flow.arrive();
  }
}

void run_backward(const Plan& plan, const Group& group,
                  const AttentionInputs& inputs, const AttentionAnswer& answer,
                  AttentionGradients& gradients) {
  KeyFlow flow(plan, group, inputs, "backward");
  Homecoming home(plan, group, inputs, gradients);
  const bool is_all = plan.steps().size() == 1;
  for (std::size_t i = 0; i < plan.steps().size(); ++i) {
    const PlanStep& step = plan.steps()[i];
    const ProfilerRange range(
        [&] { return name_of_step(plan, i, ", backward"); });
    flow.start_next();
    const AttentionInputs now = flow.inputs();
    if (i == 0) {
      AttentionGradients here{gradients.dq, gradients.dk, gradients.dv, is_all};
      attend_tiles_backward(now, step.lines, answer, here);
    } else {
      const KeyBlock found = home.room_for(now.k.size(1));
      const TokenRange sent = places_sent(step);
      Accumulator dk = Accumulator::sum_in(found.keys(), sent);
      Accumulator dv = Accumulator::sum_in(found.values(), sent);
      AttentionGradients here{gradients.dq, dk, dv, is_all};
      attend_tiles_backward(now, step.lines, answer, here);
      dk.sums();
      dv.sums();
      home.send(i, found.both);
    }
    flow.arrive();
  }
  home.receive();
}

}  // namespace longspan
