#include "longspan/batch/groups.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longspan/core/detail/check.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

std::vector<TokenRange> runs_in_row(const int64_t* row, int64_t tokens,
                                    const std::vector<int64_t>& kinds) {
  std::vector<TokenRange> runs;
  for (int64_t token = 0; token < tokens; ++token) {
    if (std::ranges::find(kinds, row[token]) == kinds.end()) continue;
    append_range(runs, {token, token + 1});
  }
  return runs;
}

}  // namespace

std::vector<std::vector<TokenRange>> groups_of(
    const PackedBatch& batch, std::string_view key,
    const std::vector<int64_t>& kinds) {
  at::Tensor packed = batch.tensor(key);
  const int64_t axes = batch.form == Form::stream ? 1 : 2;
  check(packed.dim() == axes &&
            at::isIntegralType(packed.scalar_type(), /*includeBool=*/false),
        "groups_of: `", key, "` is ", describe(packed),
        " once packed; expected one whole number a token");
  packed = packed.to(at::kCPU, at::kLong).contiguous();
  const int64_t tokens = batch.tokens();
  const int64_t* entry = packed.const_data_ptr<int64_t>();
  std::vector<std::vector<TokenRange>> groups;
  for (std::size_t row = 0; row < batch.packings.size(); ++row) {
    groups.push_back(runs_in_row(entry, tokens, kinds));
    entry += tokens;
  }
  return groups;
}

}  // namespace longspan
