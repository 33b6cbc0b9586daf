#pragma once

#include "longspan/kernels/select_keys/cpu/backward.h"
#include "longspan/kernels/select_keys/cpu/top.h"

namespace longspan {
namespace {

/// The table of the including source's instruction set.
constexpr KeySelectionSteps key_selection_steps() {
  return {.score = {key_score_steps<WideOperands<float>>(),
                    key_score_steps<WideOperands<Bfloat16>>(),
                    key_score_steps<WideOperands<Float16>>(),
                    key_score_steps<WideOperands<double>>()},
          .top = {top_key_steps<float>(), top_key_steps<double>()}};
}

}  // namespace
}  // namespace longspan
