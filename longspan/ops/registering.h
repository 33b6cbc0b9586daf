#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace longspan {

/// Small words that operators are registered with.

template <class Function>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Function>();
}

inline std::optional<at::Tensor> optional(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

/// Autocast's type for tokens, float32 for weights of the indexer.
template <c10::DeviceType device>
struct Casts {
  at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  at::Tensor operator()(const at::Tensor& t) const {
    return at::autocast::cached_cast(dtype, t, device);
  }
  at::Tensor sums(const at::Tensor& t) const {
    return at::autocast::cached_cast(at::kFloat, t, device);
  }
};

/// For the derivative of a derivative; undefined tensors want nothing.
void refuse_second_derivative(const char* who,
                              const std::vector<at::Tensor>& tensors);

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
