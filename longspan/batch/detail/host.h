#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace longspan {

/// The integers of a tensor of any shape, row by row, on the host.
std::vector<int64_t> host_list(const at::Tensor& tensor);

/// The integers of two tensors, with one copy from their device.
std::pair<std::vector<int64_t>, std::vector<int64_t>> host_lists(
    const at::Tensor& a, const at::Tensor& b);

/// One row of a table of `width` columns, without the entries that are
/// `sentinel`.
std::vector<int64_t> row_entries(const std::vector<int64_t>& table, int64_t row,
                                 int64_t width, int64_t sentinel);

}  // namespace longspan
