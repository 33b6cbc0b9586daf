#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "longspan/core/ownership.h"

namespace longspan {

class Mask;

/// The table that exchange_needed takes, from who sees whom and who owns what:
/// every rank gets the keys that some of its queries see (needed_keys), and
/// nothing else. Keys are tokens of the ownership, so not for compressed masks.
/// int64 [n, 4] = (from, to, local begin, length), ordered by `to`, then
/// `from`.
at::Tensor needed_table(const Mask& mask, const Ownership& ownership);

/// Which tokens of the stream the result of exchange_needed holds on a rank, in
/// its order.
std::vector<TokenRange> received_ranges(const at::Tensor& table,
                                        const Ownership& ownership, int rank);

/// How many tokens that are.
int64_t received_tokens(const at::Tensor& table, int rank);

}  // namespace longspan
