#include "longspan/batch/shift.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/batch/pack.h"
#include "longspan/core/check.h"
#include "longspan/core/moves.h"
#include "longspan/ops/move_tokens.h"

namespace longspan {

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
  const int64_t tokens = batch.rows * batch.length;
  const TokenView flat = token_view(row, source, Form::stream);
  const at::Scalar fill =
      row.fill.kind == Fill::Kind::constant ? row.fill.value : at::Scalar(0);
  const at::Tensor shifted =
      move_tokens(flat.tensor, flat.axis,
                  Moves::of(std::move(runs), tokens, tokens), fill)
          .view(source.sizes());

  RowBatch result = batch;
  if (named_row == nullptr) {
    TokenTensor named = row;
    named.key = as;
    result.table = result.table.with(std::move(named));
  }
  std::erase_if(result.payload,
                [&](const auto& entry) { return entry.first == as; });
  const auto known =
      std::ranges::find(result.tokens, as, &NamedTensors::value_type::first);
  if (known != result.tokens.end()) {
    known->second = shifted;
  } else {
    result.tokens.emplace_back(as, shifted);
  }
  return result;
}

}  // namespace longspan
