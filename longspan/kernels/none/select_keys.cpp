#include "longspan/kernels/hopper/select_keys.h"
#include "longspan/kernels/none/absent.h"

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
