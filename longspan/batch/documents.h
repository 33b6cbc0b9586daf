#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

/// Where the documents of a loaded batch lie, from the first of these that is
/// present:
///   seq_lens [B, P] with seq_lens_padded [B, P] or without,
///   cu_seq_lens_q [P + 1] of one row, and cu_seq_lens_k where they are equal,
///   attention_mask [B, S] (non-zero = real, runs of equal numbers are
///     documents) or [B, 1, S, S] (bool or additive, causal),
///   padding_mask [B, S] (true = pad);
/// otherwise every row is one document. Where neither lengths nor numbers in a
/// mask tell the documents of a row, every 0 in position_ids [B, S] or [1, S]
/// begins one, as packing (padding-free) collators count.
///
/// CUDA tensors: one copy to the host of the lengths or the mask, and one of
/// the positions where they are read.
std::vector<RowDocument> find_documents(const NamedTensors& batch, int64_t rows,
                                        int64_t length, int64_t sentinel);

/// true = pad, [B, S], from an attention mask of either form.
at::Tensor pads_of_attention_mask(const at::Tensor& mask);

}  // namespace longspan
