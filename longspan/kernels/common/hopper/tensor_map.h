#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "longspan/kernels/common/element.h"

namespace longspan::hopper {

/// The driver's function that describes a tensor to the copy engine. Asked for
/// at run time: nothing links against the driver.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kSince = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                         kSince, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "the CUDA driver has no cuTensorMapEncodeTiled; it is older than "
          "12.0");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

/// An array as the copy engine sees it, in boxes of 128 bytes of channels (64,
/// or 32 for floats) of `box_tokens` tokens of `box_heads` heads, head after
/// head, laid out as wgmma.cuh wants blocks. What lies past `channels` or
/// `tokens` is read as zero and not written.
template <class Pointer>
CUtensorMap tensor_map(const TokenArray<Pointer>& array, ElementType type,
                       int64_t rows, int64_t tokens, int64_t heads,
                       int channels, int box_tokens, int box_heads = 1) {
  const bool is_float = type == ElementType::float32;
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const std::array<uint64_t, 4> sizes{size(channels), size(tokens), size(heads),
                                      size(rows)};
  // An axis of length one may have any stride, which the driver would check.
  const auto bytes = [&](int64_t stride, int64_t count) {
    return size(count == 1 ? 16 : (is_float ? 4 : 2) * stride);
  };
  const std::array<uint64_t, 3> strides{bytes(array.token_stride, tokens),
                                        bytes(array.head_stride, heads),
                                        bytes(array.row_stride, rows)};
  const std::array<uint32_t, 4> box{is_float ? 32u : 64u,
                                    static_cast<uint32_t>(box_tokens),
                                    static_cast<uint32_t>(box_heads), 1};
  const std::array<uint32_t, 4> steps{1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map,
      is_float                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : type == ElementType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(static_cast<const void*>(array.data)), sizes.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace longspan::hopper
