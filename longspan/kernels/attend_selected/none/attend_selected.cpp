#include "longspan/kernels/attend_selected/ampere/attend_selected.h"
#include "longspan/kernels/attend_selected/hopper/attend_selected.h"
#include "longspan/kernels/common/none/absent.h"

namespace longspan {

namespace hopper {

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& /*args*/) {
  return no_compiler();
}

void selected_attention_forward(const SelectedForwardArgs& /*args*/,
                                void* /*stream*/) {
  never("attend_selected");
}

void selected_attention_backward(const SelectedBackwardArgs& /*args*/,
                                 void* /*stream*/) {
  never("attend_selected");
}

std::optional<std::string> why_not_selected_weights(
    const SelectedWeightsArgs& /*args*/) {
  return no_compiler();
}

void selected_weights(const SelectedWeightsArgs& /*args*/, void* /*stream*/) {
  never("attend_selected");
}

void output_delta(const OutputDeltaArgs& /*args*/, void* /*stream*/) {
  never("attend_selected");
}

}  // namespace hopper

namespace ampere {

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& /*args*/) {
  return no_compiler();
}

void selected_attention_forward(const SelectedForwardArgs& /*args*/,
                                void* /*stream*/) {
  never("attend_selected");
}

std::optional<std::string> why_not_attend_selected_backward(
    const SelectedBackwardArgs& /*args*/) {
  return no_compiler();
}

void selected_attention_backward(const SelectedBackwardArgs& /*args*/,
                                 void* /*stream*/) {
  never("attend_selected");
}

void selected_weights(const SelectedWeightsArgs& /*args*/, void* /*stream*/) {
  never("attend_selected");
}

}  // namespace ampere

}  // namespace longspan
