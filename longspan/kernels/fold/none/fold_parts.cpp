#include "longspan/kernels/fold/fold_parts.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan {

std::optional<std::string> why_not_fold_parts() {
  return no_compiler();
}

void fold_parts(const FoldPartsArgs& /*args*/, void* /*stream*/) {
  never("fold_parts");
}

}  // namespace longspan
