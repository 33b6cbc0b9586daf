#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Softmax pooling of listed rows, for each channel on its own. T is float or
/// double; all arrays are contiguous.
///
///   g[p, j] = gates[list[p, j]] + bias[j]
///   lse[p] = log sum_j exp(g[p, j])
///   out[p] = sum_j exp(g[p, j] - lse[p]) values[list[p, j]]
///
/// An entry outside of [0, rows) is an empty slot: skipped, and never used as
/// an address. A pool without rows, or whose gates are all -inf, has out 0, lse
/// -inf and passes no gradient. Pooling pools, with their lse as gates, is
/// pooling everything at once: that is how parts are merged.
template <class T>
struct PoolListedArgs {
  int64_t pools = 0, slots = 0, rows = 0, channels = 0;
  const T* values = nullptr;      // [rows, channels]
  const T* gates = nullptr;       // [rows, channels]
  const T* bias = nullptr;        // [slots, channels], or null
  const int32_t* list = nullptr;  // [pools, slots]
  T* out = nullptr;               // [pools, channels]
  T* lse = nullptr;               // [pools, channels], natural log
};

/// Adds to dvalues, dgates and dbias, which begin as zeros. Kernels on devices
/// write `by_slot` in the place of dbias, which is its sum over the pools.
template <class T>
struct PoolListedGradients {
  const T* dout = nullptr;  // [pools, channels]
  const T* dlse = nullptr;  // [pools, channels]
  T* dvalues = nullptr;     // [rows, channels]
  T* dgates = nullptr;      // [rows, channels]
  T* dbias = nullptr;       // [slots, channels], or null
  T* by_slot = nullptr;     // [pools, slots, channels], or null
};

void pool_listed(const PoolListedArgs<float>& args,
                 const ParallelFor& parallel);
void pool_listed(const PoolListedArgs<double>& args,
                 const ParallelFor& parallel);

/// `args` holds the results of pool_listed. Sums are taken in the order of the
/// pools, whatever the number of threads.
void pool_listed_backward(const PoolListedArgs<float>& args,
                          const PoolListedGradients<float>& gradients,
                          const ParallelFor& parallel);
void pool_listed_backward(const PoolListedArgs<double>& args,
                          const PoolListedGradients<double>& gradients,
                          const ParallelFor& parallel);

// ---- The same on a CUDA device; `stream` is a cudaStream_t of the current
// one.

/// Why it cannot run here, or nothing.
std::optional<std::string> why_not_pool_listed();

void pool_listed(const PoolListedArgs<float>& args, void* stream);
void pool_listed(const PoolListedArgs<double>& args, void* stream);

/// A row in several pools is added in any order; rows in one pool repeat bit
/// for bit. Empty slots of `by_slot` stay as they are.
void pool_listed_backward(const PoolListedArgs<float>& args,
                          const PoolListedGradients<float>& gradients,
                          void* stream);
void pool_listed_backward(const PoolListedArgs<double>& args,
                          const PoolListedGradients<double>& gradients,
                          void* stream);

}  // namespace longspan
