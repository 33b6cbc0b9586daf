#include "longspan/kernels/common/none/absent.h"
#include "longspan/kernels/select_keys/ampere/select_keys.h"

namespace longspan::ampere {

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& /*args*/) {
  return no_compiler();
}

std::optional<std::string> why_not_score_selected(
    const ScoreSelectedArgs& /*args*/) {
  return no_compiler();
}

std::optional<std::string> why_not_score_selected_backward(
    const ScoreSelectedBackwardArgs& /*args*/) {
  return no_compiler();
}

size_t select_keys_workspace(const SelectKeysArgs& /*args*/) {
  return 0;
}

void select_keys(const SelectKeysArgs& /*args*/, void* /*workspace*/,
                 void* /*stream*/) {
  never("select_keys");
}

void score_selected(const ScoreSelectedArgs& /*args*/, void* /*stream*/) {
  never("score_selected");
}

void score_selected_backward(const ScoreSelectedBackwardArgs& /*args*/,
                             void* /*stream*/) {
  never("score_selected backward");
}

}  // namespace longspan::ampere
