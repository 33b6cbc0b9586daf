#pragma once

#include <cstdint>

#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Matrices [matrices, rows, columns] made nearly doubly stochastic: softmax of
/// each row plus eps, columns divided by (their sum + eps), then repeat - 1
/// times rows and columns likewise.
struct SinkhornSize {
  int64_t matrices = 0, rows = 0, columns = 0;
  int64_t repeat = 1;  // 1 or more
  double eps = 0;
};

/// `out` may be the memory of `x`.
void sinkhorn(const SinkhornSize& size, const float* x, float* out,
              const ParallelFor& parallel);
void sinkhorn(const SinkhornSize& size, const double* x, double* out,
              const ParallelFor& parallel);

/// The gradient of x; `dx` may be the memory of `dout`. Nothing of the forward
/// pass is kept: it runs again, and its steps are undone one by one.
void sinkhorn_backward(const SinkhornSize& size, const float* x,
                       const float* dout, float* dx,
                       const ParallelFor& parallel);
void sinkhorn_backward(const SinkhornSize& size, const double* x,
                       const double* dout, double* dx,
                       const ParallelFor& parallel);

}  // namespace longspan
