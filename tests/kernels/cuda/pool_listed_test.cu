#include "longspan/kernels/pool/pool_listed.h"
#include "tests/kernels/cuda/device.cuh"
#include "tests/kernels/cuda/on_device.h"

namespace longspan::test {

namespace {

template <class T>
std::vector<T> drawn(int64_t count, uint64_t seed) {
  std::vector<T> numbers(count);
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<T>(normal(seed, i));
  }
  return numbers;
}

double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) most = std::max(most, std::fabs(a[i] - b[i]));
  }
  return most;
}

template <class T>
std::vector<double> widened(const std::vector<T>& x) {
  return {x.begin(), x.end()};
}

/// The device's answers and gradients against the CPU's in double.
template <class T>
void check_pools(int64_t pools, int64_t slots, int64_t rows, int64_t channels,
                 double bound) {
  const auto values = drawn<T>(rows * channels, 1);
  const auto gates = drawn<T>(rows * channels, 2);
  const auto bias = drawn<T>(slots * channels, 3);
  const auto dout = drawn<T>(pools * channels, 4);
  const auto dlse = drawn<T>(pools * channels, 5);
  std::vector<int32_t> list(pools * slots);
  for (int64_t i = 0; i < pools * slots; ++i) {
    const auto z = mixed(i);
    list[i] = z % 7 == 0   ? -1
              : z % 7 == 1 ? static_cast<int32_t>(rows)
                           : static_cast<int32_t>(i % rows);
  }
  const auto wide_values = widened(values), wide_gates = widened(gates),
             wide_bias = widened(bias), wide_dout = widened(dout),
             wide_dlse = widened(dlse);
  std::vector<double> out(pools * channels), lse(out), dvalues(rows * channels),
      dgates(dvalues), dbias(slots * channels);
  const PoolListedArgs<double> plain{pools,
                                     slots,
                                     rows,
                                     channels,
                                     wide_values.data(),
                                     wide_gates.data(),
                                     wide_bias.data(),
                                     list.data(),
                                     out.data(),
                                     lse.data()};
  pool_listed(plain, serial_for);
  pool_listed_backward(plain,
                       {wide_dout.data(), wide_dlse.data(), dvalues.data(),
                        dgates.data(), dbias.data()},
                       serial_for);

  const Device<T> values_there(values), gates_there(gates), bias_there(bias),
      dout_there(dout), dlse_there(dlse);
  const Device<int32_t> list_there(list);
  Device<T> out_there(out.size()), lse_there(out.size()),
      dvalues_there(dvalues.size()), dgates_there(dvalues.size()),
      by_slot(pools * slots * channels);
  dvalues_there.zero();
  dgates_there.zero();
  by_slot.zero();
  const PoolListedArgs<T> args{pools,
                               slots,
                               rows,
                               channels,
                               values_there.data,
                               gates_there.data,
                               bias_there.data,
                               list_there.data,
                               out_there.data,
                               lse_there.data};
  pool_listed(args, nullptr);
  pool_listed_backward(args,
                       {dout_there.data, dlse_there.data, dvalues_there.data,
                        dgates_there.data, nullptr, by_slot.data},
                       nullptr);
  ok(cudaDeviceSynchronize(), "pool_listed");
  const auto slots_there = by_slot.host();
  std::vector<double> summed(slots * channels);
  for (size_t i = 0; i < slots_there.size(); ++i) {
    summed[i % summed.size()] += slots_there[i];
  }
  const double error =
      std::max({farthest(widened(out_there.host()), out),
                farthest(widened(lse_there.host()), lse),
                farthest(widened(dvalues_there.host()), dvalues),
                farthest(widened(dgates_there.host()), dgates),
                farthest(summed, dbias)});
  report(error <= bound,
         text("pool_listed %lld pools of %lld, %lld channels: off by %.2g",
              (long long)pools, (long long)slots, (long long)channels, error));
}

using PoolListedOnAmpere = OnAmpere;

TEST_F(PoolListedOnAmpere, GivesTheAnswersOfTheCpu) {
  check_pools<double>(1, 1, 1, 1, 1e-12);
  check_pools<double>(37, 8, 37 * 8, 130, 1e-12);
  check_pools<float>(300, 8, 300 * 8, 512, 1e-4);
  check_pools<float>(9, 128, 9 * 128, 64, 1e-4);
  check_pools<float>(50, 4, 31, 33, 1e-4);  // rows in several pools
}

}  // namespace

}  // namespace longspan::test
