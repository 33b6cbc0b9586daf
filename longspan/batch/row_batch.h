#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/batch/documents.h"
#include "longspan/batch/token_table.h"

namespace longspan {

/// Rows as a loader gives them, with the optional keys, sentinels and mask
/// conventions already understood.
///
/// Always true: every tensor in `tokens` has `rows` and `length` at its row and
/// token axis; documents ascend and do not overlap.
struct RowBatch {
  int64_t rows = 0;
  int64_t length = 0;
  std::vector<RowDocument> documents;
  NamedTensors tokens;   ///< per-token tensors, in the caller's order
  NamedTensors payload;  ///< everything else, untouched
  TokenTable table;
};

struct ReadOptions {
  TokenTable table = TokenTable::standard();
  /// Fills the unused entries of seq_lens and seq_lens_padded.
  int64_t sentinel = -1000;
  /// Tensors that look like per-token tensors but are not.
  std::vector<std::string> pass_through = {};
};

/// Understands a batch as a collator gives it. Exactly one of `input_ids`
/// [B, S] and `inputs_embeds` [B, S, D] is there; documents are those of
/// find_documents(). Lengths and masks are read and dropped; all other
/// per-token tensors are kept. A tensor [B, S, ...] that the table does not
/// know is refused rather than left at full length.
RowBatch read_rows(const NamedTensors& batch, const ReadOptions& options = {});

/// The rows in `count` equal chunks, in order.
std::vector<RowBatch> chunks(const RowBatch& batch, int64_t count);

}  // namespace longspan
