#include "longspan/ops/cuda_kernels.h"

#include <ATen/Context.h>

namespace longspan {

std::optional<std::string> why_not_unordered() {
  if (!at::globalContext().deterministicAlgorithms()) return std::nullopt;
  return "it adds to keys in any order, and torch is told to be deterministic";
}

}  // namespace longspan
