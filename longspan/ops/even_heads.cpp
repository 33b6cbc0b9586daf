#include "longspan/ops/even_heads.h"

#include <ATen/ATen.h>

namespace longspan {

EvenHeads::EvenHeads(const AttentionInputs& inputs)
    : inputs_(inputs),
      heads_per_key_head_(inputs.heads_per_key_head),
      head_offset_(inputs.head_offset) {
  const int64_t heads = inputs.q.size(2);
  expanded_ =
      head_offset_ != 0 || inputs.k.size(2) * heads_per_key_head_ != heads;
  if (!expanded_) return;
  const at::Tensor which =
      at::arange(heads, at::TensorOptions(at::kLong).device(inputs.q.device()))
          .add_(head_offset_)
          .floor_divide_(heads_per_key_head_);
  inputs_.k = inputs.k.index_select(2, which);
  inputs_.v = inputs.v.index_select(2, which);
  inputs_.heads_per_key_head = 1;
  inputs_.head_offset = 0;
}

void EvenHeads::add_to_key_heads(Accumulator& total, const at::Tensor& part,
                                 int64_t row, int64_t token) const {
  if (!expanded_) {
    total.add({part, {}}, row, token);
    return;
  }
  const at::Tensor here = total.sums()
                              .out.narrow(0, row, part.size(0))
                              .narrow(1, token, part.size(1));
  // One head after another: the same sum in every run.
  for (int64_t head = 0; head < part.size(2); ++head) {
    here.select(2, (head + head_offset_) / heads_per_key_head_)
        .add_(part.select(2, head));
  }
}

}  // namespace longspan
