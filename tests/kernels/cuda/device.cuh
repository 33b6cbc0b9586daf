#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "longspan/kernels/common/element.h"
#include "tests/kernels/cuda/report.h"

/// What checks and timings of CUDA kernels share.
namespace longspan::test {

using bf16 = __nv_bfloat16;

inline void ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA: ") + what + ": " +
                           cudaGetErrorString(error));
}

/// Device memory, poisoned so that what nobody wrote shows.
template <class T>
struct Device {
  T* data = nullptr;
  size_t size = 0;

  explicit Device(size_t size) : size(size) {
    ok(cudaMalloc(&data, std::max<size_t>(size, 1) * sizeof(T)), "malloc");
    poison();
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    ok(cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyDefault),
       "copy");
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(data); }

  void poison() { ok(cudaMemset(data, 0xff, size * sizeof(T)), "poison"); }
  void zero() { ok(cudaMemset(data, 0, size * sizeof(T)), "zero"); }
  std::vector<T> host(size_t first = 0, size_t count = ~size_t{0}) const {
    std::vector<T> result(std::min(count, size - first));
    ok(cudaMemcpy(result.data(), data + first, result.size() * sizeof(T),
                  cudaMemcpyDefault),
       "copy back");
    return result;
  }
};

__host__ __device__ inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__host__ __device__ inline float normal(uint64_t seed, uint64_t i) {
  const uint64_t z = mixed(i * 0x9E3779B97F4A7C15ull + mixed(seed));
  const float u = ((z >> 40) + 1) / 16777217.f;
  const float v = (z & 0xffffff) / 16777216.f;
  return sqrtf(-2 * logf(u)) * cosf(6.2831853f * v);
}

template <class T>
__global__ void fill_normal(T* to, size_t size, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < size;
       i += size_t{gridDim.x} * blockDim.x) {
    to[i] = static_cast<T>(scale * normal(seed, i));
  }
}

template <class T>
void randomize(Device<T>& to, uint64_t seed, float scale = 1.f) {
  fill_normal<<<2048, 256>>>(to.data, to.size, seed, scale);
  ok(cudaGetLastError(), "randomize");
}

/// Random ascending lists: query t has min(t + 1, slots) distinct keys of
/// [0, min(t + 1, keys)), one from each of as many equal parts.
__global__ static void fill_lists(int32_t* to, int64_t queries, int64_t slots,
                                  int64_t keys, uint64_t seed) {
  const int64_t query = blockIdx.x;
  const int64_t seen = query + 1 < keys ? query + 1 : keys;
  for (int64_t j = threadIdx.x; j < slots; j += blockDim.x) {
    int32_t key = -1;
    if (seen <= slots) {
      if (j < seen) key = static_cast<int32_t>(j);
    } else {
      const int64_t low = j * seen / slots, high = (j + 1) * seen / slots;
      const uint64_t z = mixed(seed + mixed(query * slots + j));
      key = static_cast<int32_t>(low + z % (high - low));
    }
    to[query * slots + j] = key;
  }
}

template <class Pointer>
TokenArray<Pointer> array(Pointer data, int64_t queries, int64_t heads,
                          int64_t channels) {
  return {data, queries * heads * channels, heads * channels, channels};
}

/// Runs body(i) for all i below count, on all cores.
inline void spread_over_cores(int64_t count,
                              const std::function<void(int64_t)>& body) {
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int64_t core = 0; core < cores; ++core) {
    threads.emplace_back([&, core] {
      for (int64_t i = core; i < count; i += cores) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// |a - b| / |b|, NaN when either has one.
template <class A, class B>
double distance(const std::vector<A>& a, const std::vector<B>& b) {
  double over = 0, under = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    if (x == y) {
      under += std::isinf(y) ? 0 : y * y;
      continue;
    }
    over += (x - y) * (x - y);
    under += y * y;
  }
  return under == 0 ? (over == 0 ? 0 : INFINITY) : std::sqrt(over / under);
}

inline std::vector<double> widened(const std::vector<bf16>& x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = __bfloat162float(x[i]);
  return y;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         std::equal(reinterpret_cast<const char*>(a.data()),
                    reinterpret_cast<const char*>(a.data() + a.size()),
                    reinterpret_cast<const char*>(b.data()));
}

}  // namespace longspan::test
