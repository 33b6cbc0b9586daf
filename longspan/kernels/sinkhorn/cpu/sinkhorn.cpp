#include "longspan/kernels/sinkhorn/sinkhorn.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace longspan {

namespace {

constexpr int64_t kGrain = 1 << 14;  // numbers that are worth a thread

/// The numbers of one matrix that are divided by one number: those of a row, or
/// of a column.
struct Lines {
  int64_t count, length;
  int64_t step, stride;  // from line to line, and inside of one
};

/// One matrix at a time.
template <class T>
class SinkhornSteps {
 public:
  explicit SinkhornSteps(const SinkhornSize& size)
      : rows_{size.rows, size.columns, size.columns, 1},
        columns_{size.columns, size.rows, 1, size.columns},
        repeat_(size.repeat),
        eps_(static_cast<T>(size.eps)) {}

  int64_t divisors() const {
    return repeat_ * columns_.count + (repeat_ - 1) * rows_.count;
  }

  void softmax(const T* x, T* y) const {
    for (int64_t row = 0; row < rows_.count; ++row) {
      const T* from = x + row * rows_.step;
      T* to = y + row * rows_.step;
      const T most = *std::max_element(from, from + rows_.length);
      T sum = 0;
      for (int64_t i = 0; i < rows_.length; ++i) {
        to[i] = std::exp(from[i] - most);
        sum += to[i];
      }
      for (int64_t i = 0; i < rows_.length; ++i) to[i] /= sum;
    }
  }

  /// x becomes y; writes what it divides by.
  void forward(const T* x, T* y, T* divisor) const {
    softmax(x, y);
    for (int64_t i = 0; i < rows_.count * rows_.length; ++i) y[i] += eps_;
    divisor = divide(columns_, y, divisor);
    for (int64_t step = 1; step < repeat_; ++step) {
      divisor = divide(rows_, y, divisor);
      divisor = divide(columns_, y, divisor);
    }
  }

  /// g, the gradient of the result, becomes that of x; y is scratch.
  void backward(const T* x, T* y, T* g, T* divisor) const {
    forward(x, y, divisor);
    divisor += divisors();
    for (int64_t step = 1; step < repeat_; ++step) {
      divisor = undo(columns_, y, g, divisor);
      divisor = undo(rows_, y, g, divisor);
    }
    undo(columns_, y, g, divisor);
    softmax(x, y);
    for (int64_t row = 0; row < rows_.count; ++row) {
      const T* p = y + row * rows_.step;
      T* to = g + row * rows_.step;
      T mean = 0;
      for (int64_t i = 0; i < rows_.length; ++i) mean += to[i] * p[i];
      for (int64_t i = 0; i < rows_.length; ++i) to[i] = p[i] * (to[i] - mean);
    }
  }

 private:
  T* divide(const Lines& lines, T* y, T* divisor) const {
    for (int64_t line = 0; line < lines.count; ++line) {
      T* at = y + line * lines.step;
      T sum = 0;
      for (int64_t i = 0; i < lines.length; ++i) sum += at[i * lines.stride];
      sum += eps_;
      for (int64_t i = 0; i < lines.length; ++i) at[i * lines.stride] /= sum;
      *divisor++ = sum;
    }
    return divisor;
  }

  /// Back over one `divide`: y is what it was before, g its gradient there.
  T* undo(const Lines& lines, T* y, T* g, T* divisor) const {
    divisor -= lines.count;
    for (int64_t line = 0; line < lines.count; ++line) {
      T* at = y + line * lines.step;
      T* gradient = g + line * lines.step;
      T mean = 0;
      for (int64_t i = 0; i < lines.length; ++i) {
        mean += at[i * lines.stride] * gradient[i * lines.stride];
      }
      for (int64_t i = 0; i < lines.length; ++i) {
        gradient[i * lines.stride] =
            (gradient[i * lines.stride] - mean) / divisor[line];
        at[i * lines.stride] *= divisor[line];
      }
    }
    return divisor;
  }

  Lines rows_, columns_;
  int64_t repeat_;
  T eps_;
};

/// visit(matrix, y, divisors) for every matrix, with memory for both.
template <class T, class Visit>
void each_matrix(const SinkhornSize& size, const SinkhornSteps<T>& steps,
                 const ParallelFor& parallel, const Visit& visit) {
  const int64_t numbers = size.rows * size.columns;
  if (numbers == 0) return;
  const int64_t work = numbers * size.repeat;
  parallel(
      size.matrices, std::max<int64_t>(1, kGrain / work),
      [&](int64_t begin, int64_t end) {
        std::vector<T> y(static_cast<std::size_t>(numbers));
        std::vector<T> divisors(static_cast<std::size_t>(steps.divisors()));
        for (int64_t i = begin; i < end; ++i) {
          visit(i * numbers, y.data(), divisors.data());
        }
      });
}

template <class T>
void run_sinkhorn(const SinkhornSize& size, const T* x, T* out,
                  const ParallelFor& parallel) {
  const SinkhornSteps<T> steps(size);
  each_matrix(size, steps, parallel, [&](int64_t at, T* /*y*/, T* divisors) {
    steps.forward(x + at, out + at, divisors);
  });
}

template <class T>
void run_sinkhorn_backward(const SinkhornSize& size, const T* x, const T* dout,
                           T* dx, const ParallelFor& parallel) {
  const SinkhornSteps<T> steps(size);
  const int64_t numbers = size.rows * size.columns;
  each_matrix(size, steps, parallel, [&](int64_t at, T* y, T* divisors) {
    if (dx != dout) std::copy_n(dout + at, numbers, dx + at);
    steps.backward(x + at, y, dx + at, divisors);
  });
}

}  // namespace

void sinkhorn(const SinkhornSize& size, const float* x, float* out,
              const ParallelFor& parallel) {
  run_sinkhorn(size, x, out, parallel);
}

void sinkhorn(const SinkhornSize& size, const double* x, double* out,
              const ParallelFor& parallel) {
  run_sinkhorn(size, x, out, parallel);
}

void sinkhorn_backward(const SinkhornSize& size, const float* x,
                       const float* dout, float* dx,
                       const ParallelFor& parallel) {
  run_sinkhorn_backward(size, x, dout, dx, parallel);
}

void sinkhorn_backward(const SinkhornSize& size, const double* x,
                       const double* dout, double* dx,
                       const ParallelFor& parallel) {
  run_sinkhorn_backward(size, x, dout, dx, parallel);
}

}  // namespace longspan
