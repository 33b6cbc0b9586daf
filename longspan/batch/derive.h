#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "longspan/batch/cut.h"
#include "longspan/core/packing.h"
#include "longspan/ops/key_windows.h"

namespace longspan {

/// Tensors made from plain values. Without `tokens` they cover the whole
/// stream; with it, those tokens in that order (a rank's share).
at::Tensor padding_mask(const Packing& packing);
at::Tensor padding_mask(const Packing& packing,
                        const std::vector<TokenRange>& tokens);
at::Tensor position_ids(const Packing& packing);
at::Tensor position_ids(const Packing& packing,
                        const std::vector<TokenRange>& tokens);
at::Tensor document_ids(const Packing& packing);
at::Tensor document_ids(const Packing& packing,
                        const std::vector<TokenRange>& tokens);

/// int32 [documents + 1]; an error where a total does not fit.
at::Tensor cumulative_lengths(const Packing& packing);
at::Tensor cumulative_padded_lengths(const Packing& packing);

}  // namespace longspan
