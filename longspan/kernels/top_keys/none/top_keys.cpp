#include "longspan/kernels/top_keys/top_keys.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan {

std::optional<std::string> why_not_top_keys(const TopKeysArgs& /*args*/) {
  return no_compiler();
}

void top_keys(const TopKeysArgs& /*args*/, void* /*stream*/) {
  never("top_keys");
}

}  // namespace longspan
