#pragma once

#include <cstdint>
#include <vector>

#include "longspan/batch/cut.h"
#include "longspan/batch/row_batch.h"
#include "longspan/core/padding.h"

namespace longspan {

/// Rows or one stream of documents, with pads where the layout wants them.
///
/// Nothing is copied: `source` still holds the tensors as loaded, and
/// `placement` says where each token will stand. tensor(key) makes one packed
/// tensor; shard() moves straight from the source to a rank's share.
struct PackedBatch {
  RowBatch source;
  Form form = Form::stream;
  std::vector<Packing> packings;  ///< as in Cut
  Moves placement;                ///< as in Cut

  /// Tokens of a padded row, or of the stream.
  int64_t tokens() const { return placement.target_tokens(); }

  /// One per-token tensor, packed and padded: [T, ...] or [B, S', ...].
  at::Tensor tensor(std::string_view key) const;
};

/// Lays the documents of all rows end to end (stream), or leaves rows as they
/// are. Real tokens keep their order. A document brings its slot along; pads
/// around the documents of an attention or padding mask stay behind.
PackedBatch pack(RowBatch batch, Form form);

/// Lengthens a batch by pads; pads of earlier calls stay.
PackedBatch pad(const PackedBatch& batch, const PadTo& to);

/// padding_for of core for a form: rows are not cut inside documents.
PadTo padding_for(OwnershipKind kind, Form form, int ranks, int64_t share = 1);

/// A per-token tensor as one axis of tokens: itself and its token axis for
/// rows; rows and tokens merged for a stream.
struct TokenView {
  at::Tensor tensor;
  int64_t axis;
};
TokenView token_view(const TokenTensor& row, const at::Tensor& tensor,
                     Form form);

}  // namespace longspan
