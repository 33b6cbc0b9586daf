#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "longspan/kernels/common/ampere/checks.h"
#include "longspan/kernels/token_loss/token_loss.h"

namespace longspan {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

/// What a thread, a warp, then a block knows about a row: the greatest x, where
/// it comes first, sums of exp(x - most) and of that times x - most, and the
/// sum of x. Parts are put together in a fixed order.
template <class T>
struct RowSums {
  T most = -INFINITY, sum = 0, weighted = 0, total = 0;
  int64_t place = INT64_MAX;

  __device__ void raise(T to) {
    if (!(to > most)) return;
    if (sum != 0) {
      const T factor = exp(most - to);
      weighted = factor * (weighted + sum * (most - to));
      sum *= factor;
    }
    most = to;
    place = INT64_MAX;
  }
  /// `most` is at least x.
  __device__ void add(T x, int64_t at) {
    total += x;
    if (x == -INFINITY) return;  // a word that cannot come
    const T e = exp(x - most);
    sum += e;
    if (e > 0) weighted += e * (x - most);
    if (x == most && at < place) place = at;
  }
  __device__ void merge(RowSums other) {
    const T highest = most > other.most ? most : other.most;
    raise(highest);
    other.raise(highest);
    sum += other.sum;
    weighted += other.weighted;
    total += other.total;
    if (other.place < place) place = other.place;
  }
  __device__ RowSums from_lane(int distance) const {
    RowSums other;
    other.most = __shfl_down_sync(~0u, most, distance);
    other.sum = __shfl_down_sync(~0u, sum, distance);
    other.weighted = __shfl_down_sync(~0u, weighted, distance);
    other.total = __shfl_down_sync(~0u, total, distance);
    other.place = __shfl_down_sync(~0u, place, distance);
    return other;
  }
};

/// Of all threads of a block; every thread gets it.
template <class T>
__device__ RowSums<T> over_block(RowSums<T> mine) {
  __shared__ RowSums<T> parts[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.merge(mine.from_lane(distance));
  }
  __syncthreads();  // parts of the row before were read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  RowSums<T> all = parts[0];
  for (int warp = 1; warp < kWarps; ++warp) all.merge(parts[warp]);
  return all;
}

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Words {
  T values[kVector];
};

__device__ void narrow(float x, float& to) {
  to = x;
}
__device__ void narrow(double x, double& to) {
  to = x;
}
__device__ void narrow(float x, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(x);
}
__device__ void narrow(float x, __half& to) {
  to = __float2half_rn(x);
}

/// One block for each row of logits, which it reads twice: for the sums, and
/// for the gradient.
template <class T, class Out, int kVector>
struct LossRow {
  const TokenLossArgs<T>& args;
  int64_t token;
  T scale, softcap;

  __device__ T shown(T logit, int64_t word) const {
    if (args.bias != nullptr) logit += args.bias[word];
    const T scaled = logit * scale;
    return softcap == 0 ? scaled : softcap * tanh(scaled / softcap);
  }

  template <class Visit>
  __device__ void each(const Visit& visit) const {
    const T* const row = args.logits + token * args.words;
    for (int64_t i = int64_t{threadIdx.x} * kVector; i < args.words;
         i += kThreads * kVector) {
      const auto got = *reinterpret_cast<const Words<T, kVector>*>(row + i);
      Words<T, kVector> x;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        x.values[j] = shown(got.values[j], i + j);
      visit(i, x);
    }
  }

  __device__ RowSums<T> sums() const {
    RowSums<T> mine;
    each([&](int64_t i, const Words<T, kVector>& x) {
      T most = x.values[0];
#pragma unroll
      for (int j = 1; j < kVector; ++j) {
        most = x.values[j] > most ? x.values[j] : most;
      }
      mine.raise(most);
#pragma unroll
      for (int j = 0; j < kVector; ++j) mine.add(x.values[j], i + j);
    });
    return over_block(mine);
  }

  __device__ Out* gradient() const {
    return static_cast<Out*>(args.gradient) + token * args.words;
  }

  __device__ void fill(T value) const {
    if (threadIdx.x == 0) {
      args.loss[token] = args.lse[token] = args.entropy[token] = value;
      args.right[token] = false;
    }
    if (!args.with_gradient) return;
    Out filler;
    narrow(value, filler);
    for (int64_t i = threadIdx.x; i < args.words; i += kThreads) {
      gradient()[i] = filler;
    }
  }

  __device__ void run() const {
    const TokenLossOptions& options = args.options;
    const int64_t label = args.labels[token];
    if (label == options.ignored) return fill(0);
    if (label < 0 || label >= args.words) return fill(NAN);
    // Before anybody writes: the gradient may take the place of the logits.
    const T wanted = shown(args.logits[token * args.words + label], label);
    const RowSums<T> all = sums();
    const T smoothing = options.smoothing, z = options.z_loss;
    const T log_sum = log(all.sum), lse = all.most + log_sum;
    if (threadIdx.x == 0) {
      T loss = lse - wanted;
      if (smoothing != 0) loss += smoothing * (wanted - all.total / args.words);
      args.loss[token] = loss + z * lse * lse;
      args.lse[token] = lse;
      args.entropy[token] = log_sum - all.weighted / all.sum;
      args.right[token] = all.place == label;
    }
    if (!args.with_gradient) return;
    const T weight = args.weight == nullptr ? T(1) : args.weight[token];
    const T factor = weight * scale;
    const T likely = factor * (1 + 2 * z * lse);
    const T smooth = factor * smoothing / args.words;
    const T hit = factor * (1 - smoothing);
    each([&](int64_t i, const Words<T, kVector>& x) {
      Words<Out, kVector> to;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        T d = likely * exp(x.values[j] - lse) - smooth;
        if (i + j == label) d -= hit;
        if (softcap != 0) {
          const T t = x.values[j] / softcap;
          d *= 1 - t * t;
        }
        narrow(d, to.values[j]);
      }
      *reinterpret_cast<Words<Out, kVector>*>(gradient() + i) = to;
    });
  }
};

template <class T, class Out, int kVector>
__global__ void __launch_bounds__(kThreads)
    token_loss_kernel(TokenLossArgs<T> args) {
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    LossRow<T, Out, kVector>{args, token, static_cast<T>(args.options.scale),
                             static_cast<T>(args.options.softcap)}
        .run();
  }
}

template <class T, class Out>
void launch(const TokenLossArgs<T>& args, void* stream) {
  if (args.tokens == 0) return;
  const bool whole = args.words % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(args.gradient) % 16 == 0;
  const auto kernel =
      whole ? token_loss_kernel<T, Out, 4> : token_loss_kernel<T, Out, 1>;
  const int64_t blocks = std::min<int64_t>(args.tokens, 1 << 20);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("token_losses", cudaGetLastError());
}

}  // namespace

std::optional<std::string> why_not_token_losses() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(
      &attributes, token_loss_kernel<float, __nv_bfloat16, 4>);
  if (error == cudaSuccess) return std::nullopt;
  (void)cudaGetLastError();  // it is told here, and not to the next caller
  return std::string("there is no code for this device: ") +
         cudaGetErrorString(error);
}

void token_losses(const TokenLossArgs<float>& args, void* stream) {
  switch (args.gradient_type) {
    case ElementType::bfloat16:
      return launch<float, __nv_bfloat16>(args, stream);
    case ElementType::float16:
      return launch<float, __half>(args, stream);
    default:
      return launch<float, float>(args, stream);
  }
}

void token_losses(const TokenLossArgs<double>& args, void* stream) {
  launch<double, double>(args, stream);
}

}  // namespace longspan
