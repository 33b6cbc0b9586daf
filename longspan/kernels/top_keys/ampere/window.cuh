#pragma once

#include "longspan/kernels/top_keys/ampere/params.h"

namespace longspan {

/// The keys a query may choose from.
struct Window {
  int first, end;

  __device__ Window(const TopKeysParams& params, int query) {
    first = 0;
    end = params.keys;
    if (params.start != nullptr) {
      first = max(0, params.start[query * params.start_token]);
      end = min(params.keys, params.end[query * params.end_token]);
    }
    end = max(first, end);
  }
  __device__ int size() const { return end - first; }
  /// Whether scores decide anything.
  __device__ bool matters(const TopKeysParams& params) const {
    return size() > (params.scores != nullptr ? 0 : params.slots);
  }
};

}  // namespace longspan
