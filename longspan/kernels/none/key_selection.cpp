#include "longspan/kernels/ampere/key_selection.h"
#include "longspan/core/check.h"

namespace longspan::ampere {

namespace {

std::string no_compiler() {
  return "longspan was built without a CUDA compiler";
}

[[noreturn]] void never(const char* who) {
  throw InternalError(std::string(who) + ": called although it cannot run");
}

}  // namespace

std::optional<std::string> why_not_select_keys(const SelectKeysArgs& /*args*/) {
  return no_compiler();
}

std::optional<std::string> why_not_top_keys(const TopKeysArgs& /*args*/) {
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

void top_keys(const TopKeysArgs& /*args*/, void* /*stream*/) {
  never("top_keys");
}

void score_selected(const ScoreSelectedArgs& /*args*/, void* /*stream*/) {
  never("score_selected");
}

void score_selected_backward(const ScoreSelectedBackwardArgs& /*args*/,
                             void* /*stream*/) {
  never("score_selected backward");
}

}  // namespace longspan::ampere
