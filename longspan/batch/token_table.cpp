#include "longspan/batch/token_table.h"

#include <algorithm>

#include "longspan/core/detail/check.h"

namespace longspan {

at::Tensor find_tensor(const NamedTensors& tensors, std::string_view key) {
  for (const auto& [name, tensor] : tensors) {
    if (name == key) return tensor;
  }
  return {};
}

TokenTable TokenTable::standard() {
  TokenTable table;
  table.rows_ = {
      {.key = "input_ids", .axis = 1, .fill = {}},
      {.key = "inputs_embeds", .axis = 1, .fill = {}},
      {.key = "labels", .axis = 1, .fill = {.value = -100}},
      {.key = "shift_labels", .axis = 1, .fill = {.value = -100}},
      {.key = "position_ids",
       .axis = 1,
       .fill = Fill::counting(),
       .may_have_planes = true},
      {.key = "padding_mask", .axis = 1, .fill = {.value = true}},
      {.key = "loss_mask", .axis = 1, .fill = {}},
      {.key = "token_type_ids", .axis = 1, .fill = {}},
      {.key = "mm_token_type_ids", .axis = 1, .fill = {}},
      {.key = "_packed_seq_ids", .axis = 1, .fill = {}},
      {.key = "per_layer_inputs", .axis = 1, .fill = {}},
  };
  return table;
}

TokenTable TokenTable::with(TokenTensor row) const {
  check(!row.key.empty(), "TokenTable: a row without a key");
  check(row.axis >= 1, "TokenTable: '", row.key, "' has token axis ", row.axis,
        "; the row axis stands before it, so expected at least 1");
  TokenTable table = *this;
  const auto known = std::ranges::find(table.rows_, row.key, &TokenTensor::key);
  if (known != table.rows_.end()) {
    *known = std::move(row);
  } else {
    table.rows_.push_back(std::move(row));
  }
  return table;
}

const TokenTensor* TokenTable::find(std::string_view key) const {
  const auto known = std::ranges::find(rows_, key, &TokenTensor::key);
  return known == rows_.end() ? nullptr : &*known;
}

}  // namespace longspan
