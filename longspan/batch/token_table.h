#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longspan {

/// Tensors by name, in the order in which they came.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The tensor of a name, or an undefined one.
at::Tensor find_tensor(const NamedTensors& tensors, std::string_view key);

/// What stands in the slots that padding adds.
struct Fill {
  enum class Kind {
    constant,  ///< `value` everywhere
    counting,  ///< the last value of the document + 1, + 2, ...
  };
  Kind kind = Kind::constant;
  at::Scalar value = 0;

  static Fill counting() { return {Kind::counting, 0}; }
};

/// One row of the table: a tensor with one entry for each token.
struct TokenTensor {
  std::string key;
  /// The token axis of the tensor as loaded; the row axis stands before it.
  int64_t axis = 1;
  Fill fill;
  /// [planes, rows, tokens] is accepted too (rotary planes of images).
  bool may_have_planes = false;

  int64_t axis_of(const at::Tensor& tensor) const {
    return may_have_planes && tensor.dim() == 3 ? axis + 1 : axis;
  }
};

/// Every per-token tensor that batches may carry, with its axis and pad value,
/// written down once. A value: extending it gives a new table.
class TokenTable {
 public:
  /// | key | axis | fill |
  /// | input_ids | 1 | 0 | inputs_embeds | 1 | 0 | labels, shift_labels | 1 |
  /// -100 | position_ids | 1 or 2 | counting | padding_mask | 1 | true |
  /// loss_mask | 1 | 0 | token_type_ids, mm_token_type_ids | 1 | 0 |
  /// _packed_seq_ids | 1 | 0 | per_layer_inputs | 1 | 0 |
  static TokenTable standard();

  /// This table with one row added, or replaced where the key is known.
  TokenTable with(TokenTensor row) const;

  const TokenTensor* find(std::string_view key) const;
  const std::vector<TokenTensor>& rows() const { return rows_; }

 private:
  std::vector<TokenTensor> rows_;
};

}  // namespace longspan
