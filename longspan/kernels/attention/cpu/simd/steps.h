#pragma once

#include "longspan/kernels/attention/cpu/simd/backward.h"
#include "longspan/kernels/attention/cpu/simd/forward.h"

namespace longspan {
namespace {

/// The table of the including source's instruction set, by ElementType.
constexpr AttentionSteps attention_steps() {
  return {
      .forward = {forward_steps<float>(), forward_steps<Bfloat16>(),
                  forward_steps<Float16>(), forward_steps<double>()},
      .backward = {backward_steps<float>(), backward_steps<Bfloat16>(),
                   backward_steps<Float16>(), backward_steps<double>()},
  };
}

}  // namespace
}  // namespace longspan
