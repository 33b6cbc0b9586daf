#include "longspan/batch/row_batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/batch/documents.h"
#include "longspan/core/detail/check.h"
#include "longspan/core/detail/nearest.h"
#include "longspan/ops/checks.h"

namespace longspan {

namespace {

const char* const kUsedUp[] = {"seq_lens", "seq_lens_padded", "attention_mask",
                               "cu_seq_lens_q", "cu_seq_lens_k"};

/// Whether the entries lie in plain memory, one beside the other.
bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested();
}

at::Tensor checked_token_tensor(const TokenTensor& row,
                                const at::Tensor& tensor, int64_t rows,
                                int64_t length) {
  const int64_t axis = row.axis_of(tensor);
  if (row.may_have_planes && tensor.dim() == 2 && tensor.size(0) == 1 &&
      tensor.size(1) == length && rows != 1) {
    return tensor.expand({rows, length});
  }
  check(tensor.dim() > axis && tensor.size(axis - 1) == rows &&
            tensor.size(axis) == length,
        "read_rows: `", row.key, "` is ", describe(tensor), "; expected ", rows,
        " rows of ", length, " tokens at axes ", axis - 1, " and ", axis);
  check(row.fill.kind == Fill::Kind::counting ||
            fits(row.fill.value, tensor.scalar_type()),
        "read_rows: `", row.key, "` is ", describe(tensor),
        ", which cannot hold its pad value ", row.fill.value,
        "; convert it, or give it another fill in the table");
  return tensor;
}

/// The keys of a batch without tokens, and what one of them may be a slip of.
std::string what_came(const NamedTensors& batch) {
  if (batch.empty()) return "no tensor came";
  constexpr std::size_t kListed = 12;
  constexpr std::array<std::string_view, 2> names{"input_ids", "inputs_embeds"};
  std::string keys, hint;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::string& key = batch[i].first;
    if (i < kListed) keys += join(i == 0 ? "`" : ", `", key, "`");
    const std::string_view name = nearest_name(key, names);
    if (hint.empty() && !name.empty()) {
      hint = join("; did you mean `", name, "` by `", key, "`?");
    }
  }
  if (batch.size() > kListed) {
    keys += join(" and ", batch.size() - kListed, " more");
  }
  return join("tensors that came: ", keys, hint);
}

/// "did you mean `labels`? Else ", where the key may be a slip of one that
/// batches know and this one lacks.
std::string meant_instead(const std::string& key, const NamedTensors& batch,
                          const TokenTable& table) {
  std::vector<std::string_view> names(std::begin(kUsedUp), std::end(kUsedUp));
  for (const TokenTensor& row : table.rows()) names.emplace_back(row.key);
  std::erase_if(names, [&](std::string_view name) {
    return find_tensor(batch, name).defined();
  });
  const std::string_view name = nearest_name(key, names);
  return name.empty() ? "" : join("did you mean `", name, "`? Else ");
}

}  // namespace

RowBatch read_rows(const NamedTensors& batch, const ReadOptions& options) {
  std::set<std::string> seen;
  for (const auto& [key, tensor] : batch) {
    check(seen.insert(key).second, "read_rows: '", key, "' comes twice");
    check(tensor.defined(), "read_rows: '", key, "' is not a tensor");
    check(is_dense(tensor) || (options.table.find(key) == nullptr &&
                               std::ranges::count(kUsedUp, key) == 0),
          "read_rows: `", key,
          "` is sparse or nested; expected a dense tensor");
  }
  check(!seen.contains("cu_seqlens"),
        "read_rows: the batch has `cu_seqlens`, so it is packed already; give "
        "the rows with seq_lens instead");
  const at::Tensor ids = find_tensor(batch, "input_ids");
  const at::Tensor embeds = find_tensor(batch, "inputs_embeds");
  if (ids.defined() == embeds.defined()) {
    throw std::invalid_argument(join(
        "read_rows: exactly one of `input_ids` and `inputs_embeds` belongs in "
        "a batch, ",
        ids.defined() ? "both are there"
                      : join("neither is there; ", what_came(batch))));
  }
  const at::Tensor& primary = ids.defined() ? ids : embeds;
  const char* const primary_key = ids.defined() ? "input_ids" : "inputs_embeds";
  check(options.table.find(primary_key) != nullptr &&
            std::ranges::count(options.pass_through, primary_key) == 0,
        "read_rows: `", primary_key, "` says how many tokens there are, so it ",
        "belongs in the table and not in pass_through");
  if (ids.defined()) {
    check(ids.dim() == 2 && is_integral(ids), "read_rows: `input_ids` is ",
          describe(ids), "; expected integers [rows, tokens]");
  } else {
    check(embeds.dim() == 3 && embeds.is_floating_point(),
          "read_rows: `inputs_embeds` is ", describe(embeds),
          "; expected floating point [rows, tokens, channels]");
  }
  RowBatch result;
  result.table = options.table;
  result.rows = primary.size(0);
  result.length = primary.size(1);
  for (const auto& [key, tensor] : batch) {
    if (std::ranges::count(kUsedUp, key) > 0) continue;
    const bool passed = std::ranges::count(options.pass_through, key) > 0;
    const TokenTensor* row = options.table.find(key);
    if (row != nullptr && !passed) {
      result.tokens.emplace_back(
          key, checked_token_tensor(*row, tensor, result.rows, result.length));
      continue;
    }
    const bool per_token = is_dense(tensor) && tensor.dim() >= 2 &&
                           result.length > 1 && tensor.size(0) == result.rows &&
                           tensor.size(1) == result.length;
    if (!passed && per_token) {
      throw std::invalid_argument(join(
          "read_rows: `", key, "` is ", describe(tensor),
          ", which looks like one entry for each token, but the table does not "
          "know it; ",
          meant_instead(key, batch, options.table),
          "add it to the table, or to pass_through to leave it whole"));
    }
    result.payload.emplace_back(key, tensor);
  }
  result.documents =
      find_documents(batch, result.rows, result.length, options.sentinel);
  return result;
}

std::vector<RowBatch> chunks(const RowBatch& batch, int64_t count) {
  check(count >= 1, "chunks: ", count, " chunks; expected at least 1");
  check(batch.rows % count == 0, "chunks: ", batch.rows,
        " rows do not split into ", count, " equal chunks");
  const int64_t rows = batch.rows / count;
  std::vector<RowBatch> parts;
  for (int64_t i = 0; i < count; ++i) {
    RowBatch part{.rows = rows,
                  .length = batch.length,
                  .documents = {},
                  .tokens = {},
                  .payload = batch.payload,
                  .table = batch.table};
    const int64_t first = i * rows * batch.length;
    for (const RowDocument& document : batch.documents) {
      if (document.row / rows != i) continue;
      part.documents.push_back(
          {document.row - i * rows,
           {document.real.begin - first, document.real.end - first},
           {document.slot.begin - first, document.slot.end - first}});
    }
    for (const auto& [key, tensor] : batch.tokens) {
      const int64_t axis = batch.table.find(key)->axis_of(tensor) - 1;
      part.tokens.emplace_back(key, tensor.narrow(axis, i * rows, rows));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace longspan
