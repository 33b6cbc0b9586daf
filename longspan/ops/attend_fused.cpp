#include "longspan/ops/attend_fused.h"

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_cudnn.h"
#include "longspan/ops/attend_flash.h"

namespace longspan {

FusedChoice FusedChoice::of(const AttentionInputs& inputs,
                            std::span<const KeyLines> lines) {
  FusedChoice choice;
  const auto not_cudnn = why_not_cudnn(inputs);
  for (const FusedSegment& segment : fused_segments(lines)) {
    const auto reason = not_cudnn ? not_cudnn : why_not_cudnn(segment);
    if (reason && choice.flash.empty()) choice.why_flash = *reason;
    (reason ? choice.flash : choice.cudnn).push_back(segment);
  }
  if (choice.flash.empty()) return choice;
  choice.why_blocked = why_not_flash(inputs);
  if (choice.why_blocked) {
    choice.cudnn.clear();
    choice.flash.clear();
  }
  return choice;
}

std::string FusedChoice::to_string() const {
  if (why_blocked) return "blocked, not flash: " + *why_blocked;
  if (flash.empty()) return "cudnn";
  if (cudnn.empty()) return "flash, not cudnn: " + why_flash;
  return join("cudnn, and flash for ", flash.size(), " of ",
              flash.size() + cudnn.size(), " parts: ", why_flash);
}

void attend_tiles_fused(const AttentionInputs& inputs,
                        std::span<const KeyLines> lines, Accumulator& running) {
  const auto choice = FusedChoice::of(inputs, lines);
  if (choice.why_blocked) {
    attend_tiles_blocked(inputs, lines, running);
    return;
  }
  if (!choice.cudnn.empty()) {
    attend_tiles_cudnn(inputs, choice.cudnn, running);
  }
  if (!choice.flash.empty()) {
    attend_tiles_flash(inputs, choice.flash, running);
  }
}

void attend_tiles_backward_fused(const AttentionInputs& inputs,
                                 std::span<const KeyLines> lines,
                                 const AttentionAnswer& answer,
                                 AttentionGradients& gradients) {
  const auto choice = FusedChoice::of(inputs, lines);
  if (choice.why_blocked) {
    attend_tiles_backward_blocked(inputs, lines, answer, gradients);
    return;
  }
  if (!choice.cudnn.empty()) {
    attend_tiles_backward_cudnn(inputs, choice.cudnn, answer, gradients);
  }
  if (!choice.flash.empty()) {
    attend_tiles_backward_flash(inputs, choice.flash, answer, gradients);
  }
}

}  // namespace longspan
