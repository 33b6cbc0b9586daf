#include "longspan/kernels/sinkhorn/sinkhorn.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "longspan/kernels/common/threads.h"

namespace longspan {

namespace {

using Numbers = std::vector<double>;

Numbers random_matrices(const SinkhornSize& size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 2);
  Numbers numbers(
      static_cast<std::size_t>(size.matrices * size.rows * size.columns));
  for (double& number : numbers) number = normal(random);
  return numbers;
}

Numbers normalized(const SinkhornSize& size, Numbers x) {
  sinkhorn(size, x.data(), x.data(), serial_for);  // in its own memory
  return x;
}

double product(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(Sinkhorn, GivesRowsAndColumnsThatAddUpToOne) {
  const SinkhornSize size{
      .matrices = 5, .rows = 4, .columns = 4, .repeat = 2000, .eps = 1e-12};
  const Numbers y = normalized(size, random_matrices(size, 1));
  for (std::size_t m = 0; m < 5; ++m) {
    for (std::size_t i = 0; i < 4; ++i) {
      double row = 0, column = 0;
      for (std::size_t j = 0; j < 4; ++j) {
        row += y[m * 16 + i * 4 + j];
        column += y[m * 16 + j * 4 + i];
      }
      EXPECT_NEAR(row, 1, 1e-6);
      EXPECT_NEAR(column, 1, 1e-6);
    }
  }
}

TEST(Sinkhorn, OnceIsSoftmaxWithColumnsDivided) {
  const SinkhornSize size{
      .matrices = 1, .rows = 2, .columns = 2, .repeat = 1, .eps = 0.25};
  const Numbers y = normalized(size, {0, std::log(3.0), 0, 0});
  // Softmax plus eps: .5 1 / .75 .75. Sums of columns plus eps: 1.5, 2.
  const Numbers expected{0.5 / 1.5, 0.5, 0.5, 0.375};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(y[i], expected[i], 1e-15);
}

TEST(Sinkhorn, HasTheDerivativeOfItsDifferences) {
  for (const int64_t repeat : {1, 2, 7}) {
    const SinkhornSize size{
        .matrices = 2, .rows = 3, .columns = 4, .repeat = repeat, .eps = 1e-3};
    const Numbers x = random_matrices(size, 2), dout = random_matrices(size, 3);
    Numbers dx = dout;  // in the memory of the other
    sinkhorn_backward(size, x.data(), dx.data(), dx.data(), serial_for);
    for (std::size_t i = 0; i < x.size(); ++i) {
      constexpr double kStep = 1e-6;
      Numbers more = x, less = x;
      more[i] += kStep;
      less[i] -= kStep;
      const double slope = (product(normalized(size, more), dout) -
                            product(normalized(size, less), dout)) /
                           (2 * kStep);
      EXPECT_NEAR(dx[i], slope, 1e-7) << repeat << " " << i;
    }
  }
}

TEST(SinkhornThreads, GiveTheSameBits) {
  const SinkhornSize size{
      .matrices = 3000, .rows = 4, .columns = 4, .repeat = 20, .eps = 1e-6};
  const Numbers x = random_matrices(size, 4), dout = random_matrices(size, 5);
  const auto run = [&](const ParallelFor& parallel) {
    Numbers y(x.size()), dx(x.size());
    sinkhorn(size, x.data(), y.data(), parallel);
    sinkhorn_backward(size, x.data(), dout.data(), dx.data(), parallel);
    y.insert(y.end(), dx.begin(), dx.end());
    return y;
  };
  EXPECT_EQ(run(serial_for), run(on_threads(4)));
}

TEST(Sinkhorn, OfNothingIsNothing) {
  for (const SinkhornSize& size :
       {SinkhornSize{.matrices = 0, .rows = 4, .columns = 4},
        SinkhornSize{.matrices = 2, .rows = 0, .columns = 4},
        SinkhornSize{.matrices = 2, .rows = 4, .columns = 0}}) {
    const double* none = nullptr;
    double* nowhere = nullptr;
    sinkhorn(size, none, nowhere, serial_for);
    sinkhorn_backward(size, none, none, nowhere, serial_for);
  }
}

}  // namespace

}  // namespace longspan
