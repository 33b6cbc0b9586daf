#pragma once

#include <cstdint>

#include "cuda_runtime.h"

/// Tensors as the copy engine knows them, and the driver's refusals.

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct CUtensorMap {
  uint8_t* data;
  int64_t sizes[4];
  int64_t strides[4];  // bytes
  int64_t box[4];
  int element_bytes;
};

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type,
                                uint32_t rank, void* data,
                                const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill);

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, int,
    cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return cudaSuccess;
}
