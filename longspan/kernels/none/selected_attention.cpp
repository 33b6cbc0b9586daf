#include "longspan/kernels/ampere/selected_attention.h"
#include "longspan/core/check.h"
#include "longspan/kernels/hopper/selected_attention.h"

namespace longspan {

namespace {

[[noreturn]] void never() {
  throw InternalError("attend_selected: called although it cannot run");
}

}  // namespace

namespace hopper {

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

void selected_attention_forward(const SelectedForwardArgs& /*args*/,
                                void* /*stream*/) {
  never();
}

void selected_attention_backward(const SelectedBackwardArgs& /*args*/,
                                 void* /*stream*/) {
  never();
}

std::optional<std::string> why_not_selected_weights(
    const SelectedWeightsArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

void selected_weights(const SelectedWeightsArgs& /*args*/, void* /*stream*/) {
  never();
}

void output_delta(const OutputDeltaArgs& /*args*/, void* /*stream*/) {
  never();
}

void sink_gradient(const SinkGradientArgs& /*args*/, void* /*stream*/) {
  never();
}

}  // namespace hopper

namespace ampere {

std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

void selected_attention_forward(const SelectedForwardArgs& /*args*/,
                                void* /*stream*/) {
  never();
}

std::optional<std::string> why_not_attend_selected_backward(
    const SelectedBackwardArgs& /*args*/) {
  return "longspan was built without a CUDA compiler";
}

void selected_attention_backward(const SelectedBackwardArgs& /*args*/,
                                 void* /*stream*/) {
  never();
}

void selected_weights(const SelectedWeightsArgs& /*args*/, void* /*stream*/) {
  never();
}

}  // namespace ampere

}  // namespace longspan
