#include "longspan/kernels/pool/pool_listed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace longspan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Arrays of one call, in double.
struct Pooling {
  int64_t pools, slots, rows, channels;
  bool with_bias = true;
  std::vector<double> values = {}, gates = {}, bias = {}, out = {}, lse = {};
  std::vector<double> dout = {}, dlse = {};
  std::vector<int32_t> list = {};

  /// Every row in one slot at most, some slots empty or wild.
  Pooling drawn(unsigned seed) const {
    Pooling p = *this;
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](int64_t count) {
      std::vector<double> numbers(static_cast<std::size_t>(count));
      for (double& x : numbers) x = normal(random);
      return numbers;
    };
    p.values = draw(rows * channels);
    p.gates = draw(rows * channels);
    if (with_bias) p.bias = draw(slots * channels);
    p.dout = draw(pools * channels);
    p.dlse = draw(pools * channels);
    p.out = p.lse = std::vector<double>(p.dout.size());
    for (int64_t i = 0; i < pools * slots; ++i) {
      const int64_t choice = static_cast<int64_t>(random() % 5);
      p.list.push_back(
          choice == 0   ? -1
          : choice == 1 ? static_cast<int32_t>(rows)
                        : static_cast<int32_t>(i % std::max<int64_t>(rows, 1)));
    }
    return p;
  }

  PoolListedArgs<double> args() {
    return {pools,
            slots,
            rows,
            channels,
            values.data(),
            gates.data(),
            with_bias ? bias.data() : nullptr,
            list.data(),
            out.data(),
            lse.data()};
  }

  double gate(int64_t p, int64_t j, int64_t c) const {
    const int32_t row = entry(p, j);
    const auto at = [&](const std::vector<double>& x, int64_t r) {
      return x[static_cast<std::size_t>(r * channels + c)];
    };
    return at(gates, row) + (with_bias ? at(bias, j) : 0);
  }
  int32_t entry(int64_t p, int64_t j) const {
    return list[static_cast<std::size_t>(p * slots + j)];
  }
  bool is_row(int64_t p, int64_t j) const {
    return entry(p, j) >= 0 && entry(p, j) < rows;
  }

  /// <out, dout> + <lse, dlse> straight from the definition.
  double objective() const {
    double total = 0;
    for (int64_t p = 0; p < pools; ++p) {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = 0, weighted = 0;
        for (int64_t j = 0; j < slots; ++j) {
          if (!is_row(p, j)) continue;
          const double weight = std::exp(gate(p, j, c));
          sum += weight;
          weighted +=
              weight *
              values[static_cast<std::size_t>(entry(p, j) * channels + c)];
        }
        if (sum == 0) continue;
        const auto at = static_cast<std::size_t>(p * channels + c);
        total += weighted / sum * dout[at] + std::log(sum) * dlse[at];
      }
    }
    return total;
  }
};

std::vector<Pooling> poolings() {
  return {{1, 1, 1, 1},  {3, 4, 12, 5},        {7, 8, 56, 130},
          {2, 3, 4, 64}, {5, 2, 40, 3, false}, {0, 4, 3, 2},
          {3, 4, 0, 2},  {4, 128, 512, 2},     {9, 3, 5, 66}};
}

TEST(PoolListed, GivesTheDefinition) {
  for (const Pooling& shape : poolings()) {
    Pooling p = shape.drawn(3);
    pool_listed(p.args(), serial_for);
    double total = 0;
    for (std::size_t i = 0; i < p.out.size(); ++i) {
      total += p.out[i] * p.dout[i];
      if (p.lse[i] == -kInfinity) {
        EXPECT_EQ(p.out[i], 0);
      } else {
        total += p.lse[i] * p.dlse[i];
      }
    }
    EXPECT_NEAR(total, p.objective(), 1e-10);
  }
}

TEST(PoolListed, PassesTheGradientsOfTheDefinition) {
  for (const Pooling& shape : poolings()) {
    Pooling p = shape.drawn(4);
    pool_listed(p.args(), serial_for);
    std::vector<double> dvalues(p.values.size()), dgates(p.gates.size()),
        dbias(p.bias.size());
    pool_listed_backward(p.args(),
                         {p.dout.data(), p.dlse.data(), dvalues.data(),
                          dgates.data(), p.with_bias ? dbias.data() : nullptr},
                         serial_for);
    const auto by_steps = [&](std::vector<double>& x,
                              const std::vector<double>& found) {
      constexpr double kStep = 1e-5;
      for (std::size_t i = 0; i < x.size(); i += 1 + x.size() / 40) {
        const double before = x[i];
        x[i] = before + kStep;
        const double up = p.objective();
        x[i] = before - kStep;
        const double down = p.objective();
        x[i] = before;
        ASSERT_NEAR(found[i], (up - down) / (2 * kStep), 1e-7);
      }
    };
    by_steps(p.values, dvalues);
    by_steps(p.gates, dgates);
    by_steps(p.bias, dbias);
  }
}

TEST(PoolListed, MergesPartsLikeRows) {
  // Pools of the even and of the odd slots, pooled by their lse.
  Pooling whole = Pooling{6, 8, 48, 70}.drawn(5);
  pool_listed(whole.args(), serial_for);
  Pooling parts = whole;
  parts.pools *= 2;
  parts.list.clear();
  for (int64_t p = 0; p < whole.pools; ++p) {
    for (int64_t parity = 0; parity < 2; ++parity) {
      for (int64_t j = 0; j < whole.slots; ++j) {
        parts.list.push_back(j % 2 == parity ? whole.entry(p, j) : -1);
      }
    }
  }
  parts.out.resize(2 * whole.out.size());
  parts.lse.resize(2 * whole.out.size());
  pool_listed(parts.args(), serial_for);
  std::vector<int32_t> pairs;
  for (int32_t i = 0; i < parts.pools; ++i) pairs.push_back(i);
  std::vector<double> out(whole.out.size()), lse(whole.out.size());
  pool_listed({whole.pools, 2, parts.pools, whole.channels, parts.out.data(),
               parts.lse.data(), nullptr, pairs.data(), out.data(), lse.data()},
              serial_for);
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(out[i], whole.out[i], 1e-14);
    if (whole.lse[i] == -kInfinity) {
      EXPECT_EQ(lse[i], -kInfinity);
    } else {
      EXPECT_NEAR(lse[i], whole.lse[i], 1e-14);
    }
  }
}

TEST(PoolListed, KeepsGreatGatesAndTellsOfNaN) {
  const std::vector<double> values{1, 2, 3, 4};
  std::vector<double> gates{1e4, 1e4, -kInfinity, -kInfinity};
  const std::vector<int32_t> list{0, 1, 2, 3};
  std::vector<double> out(2), lse(2);
  const PoolListedArgs<double> args{
      2,       2,           4,          1,         values.data(), gates.data(),
      nullptr, list.data(), out.data(), lse.data()};
  pool_listed(args, serial_for);
  EXPECT_EQ(out, (std::vector<double>{1.5, 0}));
  EXPECT_NEAR(lse[0], 1e4 + std::log(2), 1e-9);
  EXPECT_EQ(lse[1], -kInfinity);
  gates[1] = std::nan("");
  pool_listed(args, serial_for);
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(lse[0]));
}

TEST(PoolListed, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto in_parts = [](int64_t items, int64_t,
                           const std::function<void(int64_t, int64_t)>& body) {
    for (int64_t i = items; i-- > 0;) body(i, i + 1);
  };
  Pooling p = Pooling{9, 8, 31, 200}.drawn(6);  // rows in several pools
  const auto run = [&](const ParallelFor& parallel) {
    pool_listed(p.args(), parallel);
    std::vector<double> all = p.out;
    std::vector<double> dvalues(p.values.size()), dgates(p.gates.size()),
        dbias(p.bias.size());
    pool_listed_backward(p.args(),
                         {p.dout.data(), p.dlse.data(), dvalues.data(),
                          dgates.data(), dbias.data()},
                         parallel);
    all.insert(all.end(), dvalues.begin(), dvalues.end());
    all.insert(all.end(), dgates.begin(), dgates.end());
    all.insert(all.end(), dbias.begin(), dbias.end());
    return all;
  };
  EXPECT_EQ(run(serial_for), run(in_parts));
}

}  // namespace
}  // namespace longspan
