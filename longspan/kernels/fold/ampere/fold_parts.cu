#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "longspan/kernels/common/ampere/checks.h"
#include "longspan/kernels/fold/fold_parts.h"

namespace longspan {

namespace {

constexpr int kThreads = 256;
constexpr int kParts = FoldPartsArgs::kMostParts;
constexpr int kAtOnce = 4;  // parts whose loads are under way together

template <class Pointer>
__device__ int64_t place(const TokenArray<Pointer>& array, int64_t row,
                         int64_t token, int64_t head) {
  return row * array.row_stride + token * array.token_stride +
         head * array.head_stride;
}

template <class Element>
__device__ float widened(Element x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(x);
  } else {
    return x;
  }
}

template <class Element>
__device__ Element narrowed(float x) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16(x);
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __float2half(x);
  } else {
    return x;
  }
}

/// Some channels of one query and head, as they lie in memory. Eight of a half
/// type are 16 bytes, which is one load.
template <class Element, int kWidth>
struct Packed {
  static constexpr int kLoads = kWidth * static_cast<int>(sizeof(Element)) / 16;
  union {
    uint4 loads[kLoads];
    Element elements[kWidth];
  };

  /// Nobody looks at it again soon, so it need not stay in a cache.
  __device__ void read(const Element* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loads[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
    }
  }
  __device__ void write(Element* to) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(to)[i] = loads[i];
  }
};
template <class Element>
struct Packed<Element, 1> {
  Element elements[1];
  __device__ void read(const Element* from) { elements[0] = *from; }
  __device__ void write(Element* to) const { *to = elements[0]; }
};

template <class Element, int kWidth>
__device__ void add(float* sum, const Packed<Element, kWidth>& term,
                    float weight) {
  // Not 0 times whatever lies there.
  if (weight == 0.f) return;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) sum[c] += widened(term.elements[c]) * weight;
}

template <class Element, int kWidth>
__device__ void write(void* to, int64_t where, const float* sum) {
  Packed<Element, kWidth> packed;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) {
    packed.elements[c] = narrowed<Element>(sum[c]);
  }
  packed.write(static_cast<Element*>(to) + where);
}

/// Whether part i has something to say about a token.
__device__ bool has_token(const FoldPartsArgs& args, int i, int64_t token) {
  return i < args.count && token >= args.parts[i].first &&
         token < args.parts[i].first + args.parts[i].tokens;
}

/// How much each term counts for one query and head: 0 for those that are not
/// there, or saw no key.
struct Weights {
  float before, parts[kParts];
  float lse;

  __device__ Weights(const FoldPartsArgs& args, int64_t row, int64_t token,
                     int64_t head) {
    if (args.lse.data == nullptr) {
      before = args.before.data != nullptr ? 1.f : 0.f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts[i] = has_token(args, i, token) ? 1.f : 0.f;
      }
      return;
    }
    before =
        args.before.data != nullptr
            ? args.before_lse.data[place(args.before_lse, row, token, head)]
            : -INFINITY;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = -INFINITY;
      if (!has_token(args, i, token)) continue;
      const FoldPartsArgs::Part& part = args.parts[i];
      parts[i] = part.lse.data[place(part.lse, row, token - part.first, head)];
    }
    float high = before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) high = fmaxf(high, parts[i]);
    // A NaN stays one, and infinities that meet become one.
    const auto share = [&](float log) {
      return log == -INFINITY ? 0.f : expf(log - high);
    };
    before = share(before);
    float sum = before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = share(parts[i]);
      sum += parts[i];
    }
    lse = sum == 0.f ? -INFINITY : high + logf(sum);
    before = before == 0.f ? 0.f : before / sum;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = parts[i] == 0.f ? 0.f : parts[i] / sum;
    }
  }
};

/// Folds kWidth channels of a query and head.
template <class Element, int kWidth>
__device__ Weights fold(const FoldPartsArgs& args, int64_t row, int64_t token,
                        int64_t head, int64_t channel) {
  // Loads are what takes time: none waits for another, nor for the logs.
  Packed<float, kWidth> before;
  if (args.before.data != nullptr) {
    before.read(args.before.data + place(args.before, row, token, head) +
                channel);
  }
  Packed<Element, kWidth> terms[kAtOnce];
  const auto read_from = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!has_token(args, first + i, token)) continue;
      const FoldPartsArgs::Part& part = args.parts[first + i];
      terms[i].read(static_cast<const Element*>(part.out.data) +
                    place(part.out, row, token - part.first, head) + channel);
    }
  };
  read_from(0);
  const Weights weights(args, row, token, head);
  float sum[kWidth] = {};
  add(sum, before, weights.before);
#pragma unroll
  for (int first = 0; first < kParts; first += kAtOnce) {
    if (first > 0 && first >= args.count) break;
    if (first > 0) read_from(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      add(sum, terms[i], weights.parts[first + i]);
    }
  }
  const int64_t where = place(args.out, row, token, head) + channel;
  if (args.type == ElementType::bfloat16) {
    write<__nv_bfloat16, kWidth>(args.out.data, where, sum);
  } else if (args.type == ElementType::float16) {
    write<__half, kWidth>(args.out.data, where, sum);
  } else {
    write<float, kWidth>(args.out.data, where, sum);
  }
  return weights;
}

/// Blocks take `group` tokens of a row at a time, until all are done. A thread
/// takes kWidth channels of a query and head; neighbours take the next ones.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ FoldPartsArgs args, int group) {
  const int64_t row = blockIdx.y;
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned pieces = static_cast<unsigned>(args.channels) / kWidth;
  // Logs that are written where they were read must wait until all have read.
  const bool logs_in_place =
      args.lse.data != nullptr && args.lse.data == args.before_lse.data;
  for (int64_t first = int64_t{blockIdx.x} * group; first < args.tokens;
       first += int64_t{gridDim.x} * group) {
    const int64_t left = args.tokens - first;
    const auto tokens =
        static_cast<unsigned>(left < group ? left : int64_t{group});
    for (unsigned i = threadIdx.x; i < tokens * heads * pieces; i += kThreads) {
      const unsigned query = i / pieces, piece = i % pieces;
      const int64_t token = first + query / heads, head = query % heads;
      const Weights weights = fold<Element, kWidth>(args, row, token, head,
                                                    int64_t{piece} * kWidth);
      if (piece == 0 && args.lse.data != nullptr && !logs_in_place) {
        args.lse.data[place(args.lse, row, token, head)] = weights.lse;
      }
    }
    if (!logs_in_place) continue;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < tokens * heads; i += kThreads) {
      const int64_t token = first + i / heads, head = i % heads;
      args.lse.data[place(args.lse, row, token, head)] =
          Weights(args, row, token, head).lse;
    }
  }
}

bool is_aligned(const FoldPartsArgs& args) {
  bool all =
      args.channels % 8 == 0 && is_aligned(args.before) && is_aligned(args.out);
  for (int i = 0; i < args.count; ++i) {
    all = all && is_aligned(args.parts[i].out);
  }
  return all;
}

template <class Element, int kWidth>
void launch(const FoldPartsArgs& args, cudaStream_t stream) {
  // Two turns for each thread, so that narrow tokens share a block; and no more
  // blocks than the device holds at once, as far as there are few rows.
  void (*const kernel)(FoldPartsArgs, int) = fold_kernel<Element, kWidth>;
  const int64_t items = args.heads * (args.channels / kWidth);
  const int64_t group = std::max<int64_t>(1, 2 * kThreads / items);
  int device = 0, processors = 0, resident = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  const int64_t most = std::max(1, processors * resident);
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>((args.tokens + group - 1) / group, most));
  const dim3 grid(blocks, static_cast<unsigned>(args.rows));
  kernel<<<grid, kThreads, 0, stream>>>(args, static_cast<int>(group));
}

template <class Element>
void launch(const FoldPartsArgs& args, cudaStream_t stream) {
  is_aligned(args) ? launch<Element, 8>(args, stream)
                   : launch<Element, 1>(args, stream);
}

}  // namespace

std::optional<std::string> why_not_fold_parts() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, fold_kernel<float, 8>);
  if (error == cudaSuccess) return std::nullopt;
  (void)cudaGetLastError();  // it is told here, and not to the next caller
  return std::string("there is no code for this device: ") +
         cudaGetErrorString(error);
}

void fold_parts(const FoldPartsArgs& args, void* stream) {
  if (args.rows * args.tokens * args.heads == 0 || args.channels == 0) return;
  constexpr int64_t kMostRows = 65535;  // of a grid
  if (args.rows > kMostRows) {
    throw std::runtime_error("fold_parts: more than 65535 rows");
  }
  auto* on = static_cast<cudaStream_t>(stream);
  switch (args.part_type) {
    case ElementType::float32:
      launch<float>(args, on);
      break;
    case ElementType::bfloat16:
      launch<__nv_bfloat16>(args, on);
      break;
    case ElementType::float16:
      launch<__half>(args, on);
      break;
    case ElementType::float64:
      throw std::runtime_error("fold_parts: no float64 kernel");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fold_parts: ") +
                             cudaGetErrorString(error));
  }
}

}  // namespace longspan
