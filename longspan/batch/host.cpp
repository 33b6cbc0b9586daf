#include "longspan/batch/detail/host.h"

#include <ATen/ATen.h>

namespace longspan {

std::vector<int64_t> host_list(const at::Tensor& tensor) {
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  const int64_t* entry = host.const_data_ptr<int64_t>();
  return {entry, entry + host.numel()};
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> host_lists(
    const at::Tensor& a, const at::Tensor& b) {
  if (a.device().is_cpu()) return {host_list(a), host_list(b)};
  const std::vector<int64_t> both = host_list(at::cat(
      {a.to(at::kLong).flatten(), b.to(a.device(), at::kLong).flatten()}));
  return {{both.begin(), both.begin() + a.numel()},
          {both.begin() + a.numel(), both.end()}};
}

std::vector<int64_t> row_entries(const std::vector<int64_t>& table, int64_t row,
                                 int64_t width, int64_t sentinel) {
  std::vector<int64_t> entries;
  for (int64_t i = row * width; i < (row + 1) * width; ++i) {
    const int64_t entry = table[static_cast<std::size_t>(i)];
    if (entry != sentinel) entries.push_back(entry);
  }
  return entries;
}

}  // namespace longspan
