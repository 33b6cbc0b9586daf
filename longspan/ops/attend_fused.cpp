#include "longspan/ops/attend_fused.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_cudnn.h"
#include "longspan/ops/attend_flash.h"
#include "longspan/ops/attend_hopper.h"

namespace longspan {

namespace {

/// The kernels for CUDA, the one that is asked first first.
constexpr std::string_view kNames[] = {"hopper", "cudnn", "flash", "blocked"};

/// Why the environment variable keeps a kernel from being used, or nothing: the
/// kernel that it names is the first to be asked.
std::optional<std::string> why_not_wanted(std::string_view name) {
  const char* const value = std::getenv("LONGSPAN_CUDA_KERNEL");
  if (value == nullptr || *value == 0) return std::nullopt;
  const std::string_view wanted = value;
  check(std::ranges::find(kNames, wanted) != std::end(kNames),
        "LONGSPAN_CUDA_KERNEL is ", wanted,
        "; expected hopper, cudnn, flash or blocked");
  for (const std::string_view known : kNames) {
    if (known == wanted) return std::nullopt;
    if (known == name) break;
  }
  return join("LONGSPAN_CUDA_KERNEL asks for ", wanted);
}

/// `reason`, unless the kernel is not wanted anyway.
template <class Reason>
std::optional<std::string> why_not(std::string_view name,
                                   const Reason& reason) {
  const auto unwanted = why_not_wanted(name);
  return unwanted ? unwanted : reason();
}

}  // namespace

FusedChoice FusedChoice::of(const AttentionInputs& inputs,
                            std::span<const KeyLines> lines) {
  const auto reason = why_not(
      "hopper", [&] { return longspan::why_not_hopper(inputs, lines); });
  if (!reason) return {};
  FusedChoice choice = of_backward(inputs, lines);
  choice.why_not_hopper = reason;
  return choice;
}

FusedChoice FusedChoice::of_backward(const AttentionInputs& inputs,
                                     std::span<const KeyLines> lines) {
  FusedChoice choice;
  choice.why_not_hopper = "it has no derivative";
  const auto not_cudnn =
      why_not("cudnn", [&] { return why_not_cudnn(inputs); });
  for (const FusedSegment& segment : fused_segments(lines)) {
    const auto reason = not_cudnn ? not_cudnn : why_not_cudnn(segment);
    if (reason && choice.flash.empty()) choice.why_flash = *reason;
    (reason ? choice.flash : choice.cudnn).push_back(segment);
  }
  if (choice.flash.empty()) return choice;
  choice.why_blocked = why_not("flash", [&] { return why_not_flash(inputs); });
  if (choice.why_blocked) {
    choice.cudnn.clear();
    choice.flash.clear();
  }
  return choice;
}

std::string FusedChoice::to_string() const {
  if (!why_not_hopper) return "hopper";
  if (why_blocked) return "blocked, not flash: " + *why_blocked;
  if (flash.empty()) return "cudnn";
  if (cudnn.empty()) return "flash, not cudnn: " + why_flash;
  return join("cudnn, and flash for ", flash.size(), " of ",
              flash.size() + cudnn.size(), " parts: ", why_flash);
}

void attend_tiles_fused(const AttentionInputs& inputs,
                        std::span<const KeyLines> lines, Accumulator& running) {
  const auto choice = FusedChoice::of(inputs, lines);
  if (!choice.why_not_hopper) {
    attend_tiles_hopper(inputs, lines, running);
    return;
  }
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
  const auto choice = FusedChoice::of_backward(inputs, lines);
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
