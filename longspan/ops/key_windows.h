#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "longspan/core/token_range.h"

namespace longspan {

class Mask;

/// Per query the half-open window of its keys, [begin, end), in tokens of the
/// stream.
struct KeyWindows {
  at::Tensor begin;
  at::Tensor end;
};

/// keys_of of every query, int32 unless the stream is longer than 2^31 - 1
/// tokens, [0, 0) for queries that see nothing. With `tokens`: of those queries
/// alone, in that order (a rank's share).
KeyWindows key_windows(const Mask& mask);
KeyWindows key_windows(const Mask& mask, const std::vector<TokenRange>& tokens);

}  // namespace longspan
