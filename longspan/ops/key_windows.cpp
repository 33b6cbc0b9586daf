#include "longspan/ops/key_windows.h"

#include <ATen/ATen.h>

#include <limits>

#include "longspan/core/mask.h"
#include "longspan/core/per_token.h"

namespace longspan {

namespace {

template <class Index>
KeyWindows windows(const Mask& mask, const std::vector<TokenRange>& tokens,
                   at::ScalarType dtype) {
  const int64_t count = count_tokens(tokens);
  KeyWindows result{at::empty({count}, at::TensorOptions(dtype)),
                    at::empty({count}, at::TensorOptions(dtype))};
  Index* begin = result.begin.mutable_data_ptr<Index>();
  Index* end = result.end.mutable_data_ptr<Index>();
  for (TokenRange range : tokens) {
    write_key_windows(mask, range, begin, end);
    begin += range.size();
    end += range.size();
  }
  return result;
}

}  // namespace

KeyWindows key_windows(const Mask& mask,
                       const std::vector<TokenRange>& tokens) {
  return mask.keys() <= std::numeric_limits<int32_t>::max()
             ? windows<int32_t>(mask, tokens, at::kInt)
             : windows<int64_t>(mask, tokens, at::kLong);
}

KeyWindows key_windows(const Mask& mask) {
  return key_windows(mask, {{0, mask.queries()}});
}

}  // namespace longspan
