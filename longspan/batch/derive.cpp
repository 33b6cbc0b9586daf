#include "longspan/batch/derive.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/core/detail/check.h"
#include "longspan/core/per_token.h"

namespace longspan {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::vector<TokenRange> everything(int64_t tokens) {
  return {{0, tokens}};
}

/// One entry for each listed token.
template <class Entry, class Write>
at::Tensor filled(at::ScalarType dtype, const Packing& packing,
                  const std::vector<TokenRange>& tokens, const Write& write) {
  at::Tensor result =
      at::empty({count_tokens(tokens)}, at::TensorOptions(dtype));
  write(packing, tokens, result.mutable_data_ptr<Entry>());
  return result;
}

at::Tensor int32_list(std::span<const int64_t> values, const char* who) {
  check(values.empty() || values.back() <= kMaxInt32, who, ": ", values.back(),
        " tokens do not fit the 32-bit offsets that kernels take; use fewer "
        "tokens in a stream");
  at::Tensor result =
      at::empty({std::ssize(values)}, at::TensorOptions(at::kInt));
  int32_t* out = result.mutable_data_ptr<int32_t>();
  for (int64_t value : values) *out++ = static_cast<int32_t>(value);
  return result;
}

}  // namespace

at::Tensor padding_mask(const Packing& packing,
                        const std::vector<TokenRange>& tokens) {
  return filled<bool>(at::kBool, packing, tokens, write_pads);
}

at::Tensor position_ids(const Packing& packing,
                        const std::vector<TokenRange>& tokens) {
  return filled<int64_t>(at::kLong, packing, tokens, write_positions);
}

at::Tensor document_ids(const Packing& packing,
                        const std::vector<TokenRange>& tokens) {
  return filled<int64_t>(at::kLong, packing, tokens, write_document_ids);
}

at::Tensor padding_mask(const Packing& packing) {
  return padding_mask(packing, everything(packing.tokens()));
}

at::Tensor position_ids(const Packing& packing) {
  return position_ids(packing, everything(packing.tokens()));
}

at::Tensor document_ids(const Packing& packing) {
  return document_ids(packing, everything(packing.tokens()));
}

at::Tensor cumulative_lengths(const Packing& packing) {
  return int32_list(packing.cumulative_lengths(), "cumulative_lengths");
}

at::Tensor cumulative_padded_lengths(const Packing& packing) {
  return int32_list(packing.offsets(), "cumulative_padded_lengths");
}

}  // namespace longspan
