#pragma once

#include "longspan/attention/detail/call_facts.h"
#include "longspan/attention/detail/selected_call.h"
#include "longspan/ops/registering.h"

namespace longspan::selected {

/// The operator score_selected: the scores of given keys.
struct ScoreSelected {
  at::Tensor q, k, weights, indices;
  Where where = {};

  using Result = at::Tensor;
  static constexpr auto kSchema =
      "score_selected(Tensor q, Tensor k, Tensor weights, Tensor indices, "
      "Tensor? layout=None, str fetch=\"gathered\", str group=\"\") -> Tensor";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.q, self.k, self.weights, self.indices),
                          Where::fields(self.where));
  }
  template <class Run>
  auto together(const Run& run) const {
    return as_call_of(*this, q, where, run);
  }
  Result run() const;
  Result meta() const;
  void cast(const Casts& to);
  Tensors keep(const Tensors& outputs) const;
  Tensors gradients(const Tensors& kept, const Tensors& grads) const;
};

}  // namespace longspan::selected
