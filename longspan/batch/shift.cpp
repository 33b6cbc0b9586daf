#include "longspan/batch/shift.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/batch/pack.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/moves.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

namespace {

/// The tensor with its tokens moved, and its fill value where none went.
at::Tensor moved(const RowBatch& batch, const TokenTensor& row,
                 const at::Tensor& source, std::vector<Run> runs) {
  const int64_t tokens = batch.rows * batch.length;
  const TokenView flat = token_view(row, source, Form::stream);
  const at::Scalar fill =
      row.fill.kind == Fill::Kind::constant ? row.fill.value : at::Scalar(0);
  return move_tokens(flat.tensor, flat.axis,
                     Moves::of(std::move(runs), tokens, tokens), fill)
      .view(source.sizes());
}

/// Adds a per-token tensor, or replaces what has its name.
void put(RowBatch& batch, const std::string& key, const at::Tensor& tensor) {
  std::erase_if(batch.payload,
                [&](const auto& entry) { return entry.first == key; });
  const auto known =
      std::ranges::find(batch.tokens, key, &NamedTensors::value_type::first);
  if (known != batch.tokens.end()) {
    known->second = tensor;
  } else {
    batch.tokens.emplace_back(key, tensor);
  }
}

}  // namespace

RowBatch shift_left(const RowBatch& batch, const std::string& key,
                    const std::string& as, int64_t steps, Border border) {
  const at::Tensor source = find_tensor(batch.tokens, key);
  check(source.defined(), "shift_left: the batch has no '", key, "'");
  check(steps >= 0, "shift_left: ", steps, " steps; expected at least 0");
  const TokenTensor row = *batch.table.find(key);
  const TokenTensor* const named_row = batch.table.find(as);
  check(
      named_row == nullptr || named_row->axis_of(source) == row.axis_of(source),
      "shift_left: the tokens of '", key, "' are at axis ", row.axis_of(source),
      ", but the table has another axis for '", as, "'; choose another name");
  std::vector<Run> runs;
  const auto shift_inside = [&](TokenRange part) {
    const int64_t kept = std::max<int64_t>(0, part.size() - steps);
    runs.push_back({part.end - kept, part.begin, kept});
  };
  if (border == Border::row) {
    for (int64_t r = 0; r < batch.rows; ++r) {
      shift_inside({r * batch.length, (r + 1) * batch.length});
    }
  } else {
    for (const RowDocument& document : batch.documents) {
      shift_inside(document.slot);
    }
  }
  const at::Tensor shifted = moved(batch, row, source, std::move(runs));

  RowBatch result = batch;
  if (named_row == nullptr) {
    TokenTensor named = row;
    named.key = as;
    result.table = result.table.with(std::move(named));
  }
  put(result, as, shifted);
  return result;
}

RowBatch clear_pads(const RowBatch& batch, const std::string& key) {
  const at::Tensor source = find_tensor(batch.tokens, key);
  check(source.defined(), "clear_pads: the batch has no '", key, "'");
  std::vector<Run> runs;
  for (const RowDocument& document : batch.documents) {
    const auto& real = document.real;
    if (real.size() > 0) runs.push_back({real.begin, real.begin, real.size()});
  }
  RowBatch result = batch;
  put(result, key,
      moved(batch, *batch.table.find(key), source, std::move(runs)));
  return result;
}

}  // namespace longspan
