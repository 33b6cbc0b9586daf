#include "longspan/ops/pool_listed.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <type_traits>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/pool/pool_listed.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/threads.h"

namespace longspan {

namespace {

void check_pool_listed(const at::Tensor& values, const at::Tensor& gates,
                       const OptionalTensor& bias, const at::Tensor& lists) {
  const char* const who = "pool_listed";
  check(values.is_floating_point() && values.dim() == 2, who, ": `values` is ",
        describe(values), "; expected floating [rows, channels]");
  check(gates.is_floating_point() && gates.sym_sizes() == values.sym_sizes() &&
            gates.device() == values.device(),
        who, ": `gates` is ", describe(gates), " but `values` ",
        describe(values), "; expected the same shape and device");
  check(lists.scalar_type() == at::kInt && lists.dim() == 2 &&
            lists.device() == values.device(),
        who, ": `lists` is ", describe(lists),
        "; expected int32 [pools, slots] beside `values`");
  if (bias) {
    check(bias->is_floating_point() && bias->dim() == 2 &&
              bias->sym_size(0) == lists.sym_size(1) &&
              bias->sym_size(1) == values.sym_size(1) &&
              bias->device() == values.device(),
          who, ": `bias` is ", describe(*bias),
          "; expected floating [slots, channels] for `lists` ", describe(lists),
          " and `values` ", describe(values));
  }
}

/// The arguments in the accumulation type of values, as kernels read them.
struct PoolInputs {
  at::Tensor values, gates, bias, lists;

  static PoolInputs of(const at::Tensor& values, const at::Tensor& gates,
                       const OptionalTensor& bias, const at::Tensor& lists) {
    const auto plain =
        [type = accumulation_type(values.scalar_type())](const at::Tensor& t) {
          return t.to(type).contiguous();
        };
    return {plain(values), plain(gates), bias ? plain(*bias) : at::Tensor(),
            lists.contiguous()};
  }

  template <class T>
  PoolListedArgs<T> args(const Pooled& pooled) const {
    return {.pools = lists.size(0),
            .slots = lists.size(1),
            .rows = values.size(0),
            .channels = values.size(1),
            .values = values.const_data_ptr<T>(),
            .gates = gates.const_data_ptr<T>(),
            .bias = bias.defined() ? bias.const_data_ptr<T>() : nullptr,
            .list = lists.const_data_ptr<int32_t>(),
            .out = pooled.out.mutable_data_ptr<T>(),
            .lse = pooled.lse.mutable_data_ptr<T>()};
  }
  int64_t exponentials() const { return lists.numel() * values.size(1); }

  template <class Body>
  void with_type(const Body& body) const {
    if (values.scalar_type() == at::kDouble) {
      body(double());
    } else {
      body(float());
    }
  }
};

/// The rows of the slots of every pool, by torch's operations.
class ListedRows {
 public:
  explicit ListedRows(const PoolInputs& inputs)
      : inputs_(inputs),
        empty_((inputs.lists < 0)
                   .logical_or_(inputs.lists >= inputs.values.size(0))),
        places_(inputs.lists.masked_fill(empty_, 0).flatten()) {}

  /// [pools, slots, channels].
  at::Tensor of(const at::Tensor& rows) const {
    if (rows.size(0) == 0) return at::zeros(sizes(), rows.options());
    return rows.index_select(0, places_).view(sizes());
  }
  at::Tensor gates() const {
    at::Tensor gate = of(inputs_.gates);
    if (inputs_.bias.defined()) gate = gate + inputs_.bias;
    return gate.masked_fill(empty_.unsqueeze(-1), kMinusInfinity);
  }
  /// exp(gate - lse); 0 where nothing was seen.
  at::Tensor weights(const at::Tensor& lse) const {
    const at::Tensor known = lse.masked_fill(lse.isneginf(), 0).unsqueeze(1);
    return (gates() - known).exp_();
  }
  at::Tensor added_up(const at::Tensor& listed) const {
    at::Tensor rows = at::zeros_like(inputs_.values);
    if (rows.size(0) == 0) return rows;
    return rows.index_add_(0, places_, listed.flatten(0, 1));
  }

 private:
  std::vector<int64_t> sizes() const {
    return {inputs_.lists.size(0), inputs_.lists.size(1),
            inputs_.values.size(1)};
  }
  const PoolInputs& inputs_;
  at::Tensor empty_, places_;
};

bool has_pool_kernel(const at::Tensor& values) {
  return values.is_cpu() || (values.is_cuda() && !why_not_pool_listed());
}

std::string kernel_name(const char* work, const at::Tensor& values) {
  return join("kernel ", work, values.is_cpu() ? ", cpu" : ", ampere");
}

struct PoolListedBackward {
  at::Tensor dout, dlse, values, gates;
  OptionalTensor bias;
  at::Tensor lists, out, lse;

  using Result = Tensors3;
  static constexpr auto kDerivativeOf = "pool_tokens";
  static constexpr auto kSchema =
      "pool_listed_backward(Tensor dout, Tensor dlse, Tensor values, "
      "Tensor gates, Tensor? bias, Tensor lists, Tensor out, Tensor lse) "
      "-> (Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.dout, self.dlse, self.values, self.gates, self.bias,
                    self.lists, self.out, self.lse);
  }

  Result meta() const {
    return {empty_as(values), empty_as(gates),
            bias ? empty_as(*bias) : at::empty({0}, out.options())};
  }

  Result run() const {
    check_pool_listed(values, gates, bias, lists);
    if (!has_pool_kernel(values)) {
      return pool_listed_backward_by_torch(dout, dlse, values, gates, bias,
                                           lists, {out, lse});
    }
    const auto inputs = PoolInputs::of(values, gates, bias, lists);
    const auto like_sums = [&](const at::Tensor& t) {
      return t.to(inputs.values.scalar_type()).contiguous();
    };
    const at::Tensor given = like_sums(dout), given_lse = like_sums(dlse);
    const Pooled pooled{out.contiguous(), lse.contiguous()};
    at::Tensor dvalues = at::zeros_like(inputs.values);
    at::Tensor dgates = at::zeros_like(inputs.gates);
    at::Tensor dbias = bias ? at::zeros_like(inputs.bias)
                            : at::empty({0}, inputs.values.options());
    const at::Tensor by_slot =
        bias && values.is_cuda()
            ? at::zeros({lists.size(0), lists.size(1), values.size(1)},
                        inputs.values.options())
            : at::Tensor();
    const ProfilerRange range(
        [&] { return kernel_name("pool_tokens backward", values); });
    inputs.with_type([&]<class T>(T) {
      const auto args = inputs.args<T>(pooled);
      const auto array = [](const at::Tensor& t) {
        return t.defined() ? t.mutable_data_ptr<T>() : nullptr;
      };
      const PoolListedGradients<T> to{.dout = given.const_data_ptr<T>(),
                                      .dlse = given_lse.const_data_ptr<T>(),
                                      .dvalues = array(dvalues),
                                      .dgates = array(dgates),
                                      .dbias = bias ? array(dbias) : nullptr,
                                      .by_slot = array(by_slot)};
      if (values.is_cpu()) {
        pool_listed_backward(args, to, threads_for(16 * inputs.exponentials()));
      } else {
        const c10::OptionalDeviceGuard guard(values.device());
        pool_listed_backward(args, to, current_stream(values));
      }
    });
    if (by_slot.defined()) dbias = by_slot.sum(0);
    return {dvalues.to(values.scalar_type()), dgates.to(gates.scalar_type()),
            bias ? dbias.to(bias->scalar_type()) : dbias};
  }
};

struct PoolListed {
  at::Tensor values, gates;
  OptionalTensor bias;
  at::Tensor lists;

  using Result = Tensors2;
  static constexpr auto kSchema =
      "pool_listed(Tensor values, Tensor gates, Tensor? bias, Tensor lists) "
      "-> (Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.values, self.gates, self.bias, self.lists);
  }

  Result meta() const {
    check_pool_listed(values, gates, bias, lists);
    const auto empty = [&] {
      return at::empty_symint({lists.sym_size(0), values.sym_size(1)},
                              sums_like(values));
    };
    return {empty(), empty()};
  }

  Result run() const {
    check_pool_listed(values, gates, bias, lists);
    if (!has_pool_kernel(values)) {
      const Pooled found = pool_listed_by_torch(values, gates, bias, lists);
      return {found.out, found.lse};
    }
    const auto inputs = PoolInputs::of(values, gates, bias, lists);
    const auto empty = [&] {
      return at::empty({lists.size(0), values.size(1)},
                       inputs.values.options());
    };
    const Pooled pooled{empty(), empty()};
    const ProfilerRange range(
        [&] { return kernel_name("pool_tokens", values); });
    inputs.with_type([&]<class T>(T) {
      if (values.is_cpu()) {
        pool_listed(inputs.args<T>(pooled),
                    threads_for(16 * inputs.exponentials()));
        return;
      }
      const c10::OptionalDeviceGuard guard(values.device());
      pool_listed(inputs.args<T>(pooled), current_stream(values));
    });
    return {pooled.out, pooled.lse};
  }

  Tensors keep(const Tensors& outputs) const { return outputs; }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    auto [dvalues, dgates, dbias] = Operator<PoolListedBackward>::call(
        {grads[0], grads[1], values, gates, bias, lists, kept[0], kept[1]});
    return {dvalues, dgates, bias ? dbias : at::Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<PoolListed>::add_to(m);
  Operator<PoolListedBackward>::add_to(m);
}

}  // namespace

Pooled pool_listed(const at::Tensor& values, const at::Tensor& gates,
                   const OptionalTensor& bias, const at::Tensor& lists) {
  auto [out, lse] = Operator<PoolListed>::call({values, gates, bias, lists});
  return {out, lse};
}

Pooled pool_listed_by_torch(const at::Tensor& values, const at::Tensor& gates,
                            const OptionalTensor& bias,
                            const at::Tensor& lists) {
  const auto inputs = PoolInputs::of(values, gates, bias, lists);
  const ListedRows listed(inputs);
  const at::Tensor lse = at::logsumexp(listed.gates(), {1});
  return {(listed.weights(lse) * listed.of(inputs.values)).sum(1), lse};
}

Tensors3 pool_listed_backward_by_torch(
    const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& values,
    const at::Tensor& gates, const OptionalTensor& bias,
    const at::Tensor& lists, const Pooled& pooled) {
  const auto inputs = PoolInputs::of(values, gates, bias, lists);
  const ListedRows listed(inputs);
  const at::Tensor weight = listed.weights(pooled.lse);
  const at::Tensor given = dout.unsqueeze(1);
  const at::Tensor dgate =
      weight * (given * (listed.of(inputs.values) - pooled.out.unsqueeze(1)) +
                dlse.unsqueeze(1));
  return {listed.added_up(weight * given).to(values.scalar_type()),
          listed.added_up(dgate).to(gates.scalar_type()),
          bias ? dgate.sum(0).to(bias->scalar_type())
               : at::empty({0}, inputs.values.options())};
}

}  // namespace longspan
