#pragma once

#include "longspan/kernels/common/cpu/bf16/pack.h"

namespace longspan {
namespace {

/// C = A B or C += A B of bfloat16, summed in float; layouts as in pack.h.
/// Columns are whole steps of 16. A and B have room, and zeros in their depth,
/// up to whole steps of the engine that multiplies; C has the room.
struct PairProduct {
  const uint16_t* a;  // [rows, depth]
  int64_t a_stride;
  const uint32_t* b;  // [depth / 2, columns]
  int64_t b_stride;
  float* c;  // [rows, columns]
  int64_t c_stride;
  int rows, depth, columns;
};

enum class Begin { zero, add };

}  // namespace
}  // namespace longspan
