#include "longspan/kernels/common/none/absent.h"
#include "longspan/kernels/select_keys/hopper/select_keys.h"

namespace longspan::hopper {

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& /*args*/) {
  return no_compiler();
}

size_t select_keys_workspace(const SelectKeysArgs& /*args*/) {
  return 0;
}

void select_keys(const SelectKeysArgs& /*args*/, void* /*workspace*/,
                 void* /*stream*/) {
  never("select_keys");
}

}  // namespace longspan::hopper
