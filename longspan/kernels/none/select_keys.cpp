#include "longspan/kernels/hopper/select_keys.h"
#include "longspan/core/check.h"

namespace longspan::hopper {

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

std::optional<std::string> why_not_top_keys(const TopKeysArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

size_t select_keys_workspace(const SelectKeysArgs& /*args*/) {
  return 0;
}

void select_keys(const SelectKeysArgs& /*args*/, void* /*workspace*/,
                 void* /*stream*/) {
  throw InternalError("select_keys: called although it cannot run");
}

void top_keys(const TopKeysArgs& /*args*/, void* /*stream*/) {
  throw InternalError("top_keys: called although it cannot run");
}

}  // namespace longspan::hopper
