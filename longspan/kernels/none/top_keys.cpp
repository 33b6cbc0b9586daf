#include "longspan/kernels/cuda/top_keys.h"
#include "longspan/kernels/none/absent.h"

namespace longspan {

std::optional<std::string> why_not_top_keys(const TopKeysArgs& /*args*/) {
  return no_compiler();
}

void top_keys(const TopKeysArgs& /*args*/, void* /*stream*/) {
  never("top_keys");
}

}  // namespace longspan
