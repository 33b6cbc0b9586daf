#include <algorithm>
#include <limits>

#include "longspan/kernels/common/ampere/checks.h"
#include "longspan/kernels/pool/pool_listed.h"

namespace longspan {

namespace {

constexpr int kThreads = 128;  // neighbours read neighbouring channels

/// One thread for one channel of one pool: a pool's slots are few, and a warp
/// reads 32 channels of a row at once.
template <class T>
struct PoolThread {
  const PoolListedArgs<T>& args;
  int64_t pool, channel;

  __device__ int64_t place(int64_t row) const {
    return row * args.channels + channel;
  }
  __device__ T gate(int64_t row, int64_t slot) const {
    const T gate = args.gates[place(row)];
    return args.bias == nullptr ? gate : gate + args.bias[place(slot)];
  }
  template <class Visit>
  __device__ void each_slot(const Visit& visit) const {
    for (int64_t slot = 0; slot < args.slots; ++slot) {
      const int64_t row = args.list[pool * args.slots + slot];
      if (row >= 0 && row < args.rows) visit(row, slot);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(PoolListedArgs<T> args) {
  const int64_t channel = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (channel >= args.channels) return;
  for (int64_t pool = blockIdx.x; pool < args.pools; pool += gridDim.x) {
    const PoolThread<T> here{args, pool, channel};
    T most = -INFINITY, sum = 0, out = 0;
    here.each_slot([&](int64_t row, int64_t slot) {
      const T gate = here.gate(row, slot);
      if (gate > most) most = gate;
    });
    if (most == -INFINITY) most = 0;
    here.each_slot([&](int64_t row, int64_t slot) {
      const T weight = exp(here.gate(row, slot) - most);
      sum += weight;
      out += weight * args.values[here.place(row)];
    });
    args.out[here.place(pool)] = sum == 0 ? T(0) : out / sum;
    args.lse[here.place(pool)] = most + log(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    pool_backward_kernel(PoolListedArgs<T> args, PoolListedGradients<T> to) {
  const int64_t channel = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (channel >= args.channels) return;
  for (int64_t pool = blockIdx.x; pool < args.pools; pool += gridDim.x) {
    const PoolThread<T> here{args, pool, channel};
    const T lse = args.lse[here.place(pool)];
    if (lse == -INFINITY) continue;
    const T out = args.out[here.place(pool)];
    const T dout = to.dout[here.place(pool)];
    const T dlse = to.dlse[here.place(pool)];
    here.each_slot([&](int64_t row, int64_t slot) {
      const int64_t at = here.place(row);
      const T weight = exp(here.gate(row, slot) - lse);
      atomicAdd(to.dvalues + at, weight * dout);
      const T dgate = weight * (dout * (args.values[at] - out) + dlse);
      atomicAdd(to.dgates + at, dgate);
      if (to.by_slot != nullptr) {
        to.by_slot[here.place(pool * args.slots + slot)] = dgate;
      }
    });
  }
}

template <class T>
dim3 grid_of(const PoolListedArgs<T>& args) {
  const int64_t columns = (args.channels + kThreads - 1) / kThreads;
  const int64_t pools = std::min<int64_t>(args.pools, 1 << 20);
  return {static_cast<unsigned>(pools), static_cast<unsigned>(columns)};
}

template <class T>
void launch_pool(const PoolListedArgs<T>& args, void* stream) {
  if (args.pools == 0 || args.channels == 0) return;
  pool_kernel<T>
      <<<grid_of(args), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("pool_listed", cudaGetLastError());
}

template <class T>
void launch_pool_backward(const PoolListedArgs<T>& args,
                          const PoolListedGradients<T>& gradients,
                          void* stream) {
  if (args.pools == 0 || args.channels == 0) return;
  pool_backward_kernel<T>
      <<<grid_of(args), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          args, gradients);
  check_launch("pool_listed_backward", cudaGetLastError());
}

}  // namespace

std::optional<std::string> why_not_pool_listed() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, pool_kernel<float>);
  if (error == cudaSuccess) return std::nullopt;
  (void)cudaGetLastError();  // it is told here, and not to the next caller
  return std::string("there is no code for this device: ") +
         cudaGetErrorString(error);
}

void pool_listed(const PoolListedArgs<float>& args, void* stream) {
  launch_pool(args, stream);
}

void pool_listed(const PoolListedArgs<double>& args, void* stream) {
  launch_pool(args, stream);
}

void pool_listed_backward(const PoolListedArgs<float>& args,
                          const PoolListedGradients<float>& gradients,
                          void* stream) {
  launch_pool_backward(args, gradients, stream);
}

void pool_listed_backward(const PoolListedArgs<double>& args,
                          const PoolListedGradients<double>& gradients,
                          void* stream) {
  launch_pool_backward(args, gradients, stream);
}

}  // namespace longspan
