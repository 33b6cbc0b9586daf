#pragma once

#include <string>

#include "longspan/batch/row_batch.h"

namespace longspan {

/// Where a shift stops: at the end of a row, or already at the end of each
/// document's slot.
enum class Border { row, document };

/// Adds the tensor `as` (or replaces it): every token gets the value of `key`
/// `steps` tokens further on, or the fill value of `key` where there is no such
/// token. Works on loaded rows, so that next-token labels and multi-token
/// prediction (MTP) are right at the borders of shards.
RowBatch shift_left(const RowBatch& batch, const std::string& key,
                    const std::string& as, int64_t steps = 1,
                    Border border = Border::row);

/// Replaces a tensor by one that has its fill value at every token outside of
/// documents, so that targets of pads are not learned.
RowBatch clear_pads(const RowBatch& batch, const std::string& key);

}  // namespace longspan
