#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "longspan/kernels/cuda/merge_partials.h"

namespace longspan {

namespace {

__device__ float as_float(float x) {
  return x;
}
__device__ float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ float as_float(__half x) {
  return __half2float(x);
}

/// One warp for each query and head: its lanes share the channels.
template <class Element>
__global__ void merge_kernel(MergePartialsArgs args) {
  const int64_t query = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  if (query >= args.rows * args.tokens * args.heads) return;
  const int64_t head = query % args.heads;
  const int64_t token = query / args.heads % args.tokens;
  const int64_t row = query / args.heads / args.tokens;
  const auto place = [&](const auto& array) {
    return row * array.row_stride + token * array.token_stride +
           head * array.head_stride;
  };
  const float part = args.part_lse.data[place(args.part_lse)];
  if (part == -INFINITY) return;
  float* lse = args.lse.data + place(args.lse);
  const float before = *lse;
  const float high = fmaxf(before, part);
  // A NaN on either side stays one.
  const float apart = before == part ? 0.f : fabsf(before - part);
  const float both = high + log1pf(expf(-apart));
  const float keep = before == -INFINITY ? 0.f : expf(before - both);
  const float take = before == -INFINITY ? 1.f : expf(part - both);
  float* out = args.out.data + place(args.out);
  const auto* part_out =
      static_cast<const Element*>(args.part_out.data) + place(args.part_out);
  for (int channel = static_cast<int>(threadIdx.x); channel < args.channels;
       channel += 32) {
    const float old = keep == 0.f ? 0.f : out[channel] * keep;
    out[channel] = old + as_float(part_out[channel]) * take;
  }
  __syncwarp();
  if (threadIdx.x == 0) *lse = before == -INFINITY ? part : both;
}

template <class Element>
void launch(const MergePartialsArgs& args, cudaStream_t stream) {
  constexpr int kWarps = 8;
  const int64_t queries = args.rows * args.tokens * args.heads;
  const auto blocks = static_cast<unsigned>((queries + kWarps - 1) / kWarps);
  merge_kernel<Element><<<blocks, dim3(32, kWarps), 0, stream>>>(args);
}

}  // namespace

std::optional<std::string> why_not_merge_partials() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, merge_kernel<float>);
  if (error == cudaSuccess) return std::nullopt;
  (void)cudaGetLastError();  // it is told here, and not to the next caller
  return std::string("there is no code for this device: ") +
         cudaGetErrorString(error);
}

void merge_partials(const MergePartialsArgs& args, void* stream) {
  if (args.rows * args.tokens * args.heads == 0 || args.channels == 0) return;
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
      throw std::runtime_error("merge_partials: no float64 kernel");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("merge_partials: ") +
                             cudaGetErrorString(error));
  }
}

}  // namespace longspan
