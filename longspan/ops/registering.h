#pragma once

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "longspan/ops/checks.h"
#include "longspan/ops/gradient_flow.h"
#include "longspan/ops/tensors.h"

namespace longspan {

/// How an operator is registered with torch: once, as a struct of its
/// arguments.
///
///   struct Double {
///     at::Tensor x;
///     double more = 2;
///
///     using Result = at::Tensor;
///     static constexpr auto kSchema =
///         "double(Tensor x, float more) -> Tensor";
///     template <class Self>
///     static auto fields(Self& self) {  // in the order of the schema
///       return std::tie(self.x, self.more);
///     }
///     Result run() const;   // CPU and CUDA, below autograd
///     Result meta() const;  // the same without values, for tracing
///   };
///   TORCH_LIBRARY_FRAGMENT(longspan, m) { Operator<Double>::add_to(m); }
///
/// Operator<Double>::call({x, 3}) is torch.ops.longspan.double(x, 3).
/// A struct may have more:
///   cast(to)            what autocast does to the arguments (see Casts)
///   gradients(kept, d)  the gradients of the arguments, in their order; those
///                       left out at the end have none. It is called on the
///                       original arguments, with the outputs that
///                       keep(outputs) named and the gradients d of all
///                       outputs. keep may also drop arguments.
///   constants(outputs)  outputs without a gradient
///   kept_is_ours        a bool that is set before gradients(): whether what
///                       was kept is read for the last time (see is_last_use);
///                       d is then undefined where no gradient comes
///   kDerivativeOf       who refuses a second derivative
///   together(run)       calls run(), which is the operator's, with what has to
///                       be done around it, such as telling other ranks
///
/// Without gradients() no gradient passes.

template <class Function>
auto find_op(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name.c_str(), "")
      .template typed<Function>();
}

/// Autocast's type for tokens, float32 for weights of the indexer.
struct Casts {
  c10::DeviceType device;
  at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  at::Tensor operator()(const at::Tensor& t) const {
    return at::autocast::cached_cast(dtype, t, device);
  }
  at::Tensor sums(const at::Tensor& t) const {
    return at::autocast::cached_cast(at::kFloat, t, device);
  }
};

[[noreturn]] void refuse_second_derivative(const char* who);

inline bool has_tangent(const OptionalTensor& t) {
  return t && has_tangent(*t);
}
template <class T>
bool has_tangent(const T& /*other*/) {
  return false;
}

/// Whether an argument asks for a gradient, or has one of forward mode.
inline bool asks_for_gradient(const at::Tensor& t) {
  return t.defined() &&
         ((at::GradMode::is_enabled() && t.requires_grad()) || has_tangent(t));
}
inline bool asks_for_gradient(const OptionalTensor& t) {
  return t && asks_for_gradient(*t);
}
template <class T>
bool asks_for_gradient(const T& /*other*/) {
  return false;
}

/// Whether this backward pass is the last to read what autograd kept, and no
/// other tensor shares its memory: then it may be overwritten. Only for outputs
/// that callers never see, since it cannot be known whether Python holds one.
bool is_last_use(const Tensors& kept);

/// Arguments in the form that autograd keeps: tensors, and everything else.
struct KeptArguments {
  Tensors tensors = {};
  std::vector<c10::IValue> others = {};

  void put(const at::Tensor& t) { tensors.push_back(t); }
  void put(const OptionalTensor& t) { put(t.value_or(at::Tensor())); }
  template <class T>
  void put(const T& other) {
    others.emplace_back(other);
  }
};

/// The arguments from what autograd kept, in the same order.
struct RestoredArguments {
  const Tensors& tensors;
  const std::vector<c10::IValue>& others;
  std::size_t next_tensor = 0, next_other = 0;

  void take(at::Tensor& t) { t = tensors[next_tensor++]; }
  void take(OptionalTensor& t) { t = optional(tensors[next_tensor++]); }
  template <class T>
  void take(T& other) {
    other = others[next_other++].to<T>();
  }
};

inline Tensors listed(const at::Tensor& result) {
  return {result};
}
template <class... T>
Tensors listed(const std::tuple<T...>& results) {
  return std::apply([](const T&... t) { return Tensors{t...}; }, results);
}

template <class Result>
Result results_of(const Tensors& list) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return list[0];
  } else {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return Result{list[i]...};
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

/// How torch passes an argument to a kernel.
template <class T>
using Passed = std::conditional_t<
    std::is_arithmetic_v<T> || std::is_same_v<T, c10::SymInt>, T, const T&>;

template <class Op, class Fields = decltype(Op::fields(std::declval<Op&>()))>
class Operator;

template <class Op, class... T>
class Operator<Op, std::tuple<T&...>> {
 public:
  using Result = typename Op::Result;
  using Function = Result(Passed<T>...);

  static Result call(const Op& op) {
    return std::apply([](const T&... a) { return handle().call(a...); },
                      Op::fields(op));
  }

  static void add_to(torch::Library& m) {
    using c10::DispatchKey;
    m.def(Op::kSchema, {at::Tag::pt2_compliant_tag});
    const auto add = [&](DispatchKey key, Function* kernel) {
      m.impl(name().c_str(), torch::dispatch(key, kernel));
    };
    add(DispatchKey::CPU, run);
    add(DispatchKey::CUDA, run);
    add(DispatchKey::Meta, meta);
    add(DispatchKey::Autograd, autograd);
    if constexpr (requires(Op op, const Casts& to) { op.cast(to); }) {
      add(DispatchKey::AutocastCPU,
          autocast<at::kCPU, DispatchKey::AutocastCPU>);
      add(DispatchKey::AutocastCUDA,
          autocast<at::kCUDA, DispatchKey::AutocastCUDA>);
    }
  }

 private:
  static std::string name() {
    const std::string schema = Op::kSchema;
    return schema.substr(0, schema.find('('));
  }

  static const auto& handle() {
    static const auto found = find_op<Function>("longspan::" + name());
    return found;
  }

  static Op packed(const T&... a) {
    Op op;
    Op::fields(op) = std::tie(a...);
    return op;
  }

  static Result run(Passed<T>... a) {
    const Op op = packed(a...);
    if constexpr (requires { op.together([&] { return op.run(); }); }) {
      return op.together([&] { return op.run(); });
    } else {
      return op.run();
    }
  }
  static Result meta(Passed<T>... a) { return packed(a...).meta(); }

  static Result below_autograd(const T&... a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return handle().call(a...);
  }

  static Result autograd(Passed<T>... a) {
    const bool asks = (asks_for_gradient(a) || ...);
    const GradientFlow flow(asks);
    if (!asks) return below_autograd(a...);
    if constexpr (requires { Op::kDerivativeOf; }) {
      refuse_second_derivative(Op::kDerivativeOf);
    } else if constexpr (requires(const Op& op) { op.gradients({}, {}); }) {
      refuse_transforms(name().c_str());
      if ((has_tangent(a) || ...)) refuse_forward_mode(name().c_str());
      return results_of<Result>(Node::apply(a...));
    } else {
      return below_autograd(a...);
    }
  }

  template <c10::DeviceType device, c10::DispatchKey key>
  static Result autocast(Passed<T>... a) {
    const c10::impl::ExcludeDispatchKeyGuard guard(key);
    Op op = packed(a...);
    op.cast(Casts{device});
    return call(op);
  }

  class Node : public torch::autograd::Function<Node> {
   public:
    static Tensors forward(torch::autograd::AutogradContext* ctx,
                           const T&... a) {
      const Tensors outputs = listed(below_autograd(a...));
      Op op = packed(a...);
      const Tensors outputs_kept = op.keep(outputs);
      KeptArguments kept;
      std::apply([&](const T&... field) { (kept.put(field), ...); },
                 Op::fields(std::as_const(op)));
      kept.tensors.insert(kept.tensors.end(), outputs_kept.begin(),
                          outputs_kept.end());
      ctx->save_for_backward(std::move(kept.tensors));
      ctx->saved_data["others"] =
          c10::ivalue::Tuple::create(std::move(kept.others));
      if constexpr (requires { op.kept_is_ours; }) {
        // Nor are there zeros as large as what was kept, as its gradients.
        ctx->set_materialize_grads(false);
        // A hook may have shown them to somebody.
        ctx->saved_data["shown"] =
            at::SavedTensorDefaultHooks::get_hooks().has_value();
      }
      if constexpr (requires { op.constants(outputs); }) {
        ctx->mark_non_differentiable(op.constants(outputs));
      }
      return outputs;
    }

    static Tensors backward(torch::autograd::AutogradContext* ctx,
                            const Tensors& grads) {
      const Tensors saved = ctx->get_saved_variables();
      const auto others = ctx->saved_data.at("others").toTuple();
      const std::vector<c10::IValue> values = others->elements().vec();
      RestoredArguments kept{saved, values};
      Op op;
      std::apply([&](T&... field) { (kept.take(field), ...); }, Op::fields(op));
      const Tensors outputs(
          saved.begin() + static_cast<int64_t>(kept.next_tensor), saved.end());
      if constexpr (requires { op.kept_is_ours; }) {
        op.kept_is_ours =
            !ctx->saved_data.at("shown").toBool() && is_last_use(outputs);
      }
      Tensors gradients = std::as_const(op).gradients(outputs, grads);
      gradients.resize(sizeof...(T));
      return gradients;
    }
  };
};

/// Tensors without values: like t; like q with other channels; the sizes of q
/// less its last `dropped` ones and then more, in the accumulation type.
at::Tensor empty_as(const at::Tensor& t);
at::Tensor empty_out(const at::Tensor& q, int64_t value_dim);
at::Tensor empty_sums(const at::Tensor& q, int64_t dropped,
                      std::vector<c10::SymInt> more);
at::Tensor empty_dsink(const std::optional<at::Tensor>& sink,
                       const at::Tensor& lse);
at::Tensor empty_target(const at::Tensor& q, const at::Tensor& kv, bool listed,
                        c10::SymInt slots);

}  // namespace longspan
