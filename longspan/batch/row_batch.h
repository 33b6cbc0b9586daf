#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/batch/token_table.h"
#include "longspan/core/token_range.h"

namespace longspan {

/// A document as it lies in loaded rows. Both ranges count tokens row by row
/// (row * length + column); `real` lies inside `slot`, `slot` inside one row.
struct RowDocument {
  int64_t row = 0;
  TokenRange real;
  TokenRange slot;
  friend bool operator==(const RowDocument&, const RowDocument&) = default;
};

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
  /// Tensors that look like one entry for each token but are none.
  std::vector<std::string> pass_through = {};
};

/// Understands a batch as a collator gives it. Exactly one of `input_ids`
/// [B, S] and `inputs_embeds` [B, S, D] is there. Documents come from the first
/// of these that is present:
///   seq_lens [B, P] with seq_lens_padded [B, P] or without,
///   attention_mask [B, S] (non-zero = real, runs of equal numbers are
///     documents) or [B, 1, S, S] (bool or additive, causal),
///   padding_mask [B, S] (true = pad);
/// otherwise every row is one document. The lengths and masks are used up; all
/// other per-token tensors are kept. Tensors that the table does not know but
/// that are [B, S, ...] are refused rather than left behind at full length.
///
/// CUDA tensors: one copy to the host, of the lengths or the mask.
RowBatch read_rows(const NamedTensors& batch, const ReadOptions& options = {});

/// The rows in `count` equal chunks, in order.
std::vector<RowBatch> chunks(const RowBatch& batch, int64_t count);

/// true = pad, [B, S], from an attention mask of either form.
at::Tensor pads_of_attention_mask(const at::Tensor& mask);

}  // namespace longspan
