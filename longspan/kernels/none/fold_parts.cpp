#include "longspan/kernels/cuda/fold_parts.h"

#include "longspan/core/check.h"

namespace longspan {

std::optional<std::string> why_not_fold_parts() {
  return "longspan was built without a CUDA compiler";
}

void fold_parts(const FoldPartsArgs& /*args*/, void* /*stream*/) {
  throw InternalError("fold_parts: called although it cannot run");
}

}  // namespace longspan
