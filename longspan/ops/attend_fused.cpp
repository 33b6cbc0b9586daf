#include "longspan/ops/attend_fused.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "longspan/core/detail/check.h"
#include "longspan/ops/attend_cudnn.h"
#include "longspan/ops/attend_flash.h"
#include "longspan/ops/attend_hopper.h"
#include "longspan/ops/profiler_range.h"

namespace longspan {

namespace {

/// The kernels for CUDA, in the order in which they are asked.
constexpr std::string_view kNames[] = {"hopper", "cudnn", "flash", "blocked"};

/// The kernel that LONGSPAN_CUDA_KERNEL names, the first to be asked; or none.
std::string_view wanted_kernel() {
  const char* const value = std::getenv("LONGSPAN_CUDA_KERNEL");
  if (value == nullptr) return {};
  const std::string_view wanted = value;
  check(wanted.empty() || std::ranges::find(kNames, wanted) != std::end(kNames),
        "LONGSPAN_CUDA_KERNEL is ", wanted,
        "; expected hopper, cudnn, flash or blocked");
  return wanted;
}

/// `reason`, unless one after this kernel is wanted anyway.
template <class Reason>
std::optional<std::string> why_not(std::string_view name,
                                   const Reason& reason) {
  const std::string_view wanted = wanted_kernel();
  const auto* const asked = std::ranges::find(kNames, wanted);
  if (asked != std::end(kNames) && std::ranges::find(kNames, name) < asked) {
    return join("LONGSPAN_CUDA_KERNEL asks for ", wanted);
  }
  return reason();
}

/// Few lines, which may become one segment, of as many tokens as cuDNN wants:
/// others are not worth the time of the host to look.
bool may_be_a_call_for_cudnn(const AttentionInputs& inputs,
                             std::span<const KeyLines> lines) {
  constexpr int64_t kMost = 8;
  return std::min(inputs.q.size(1), inputs.k.size(1)) >= kLeastTokensOfCudnn &&
         std::ssize(lines) <= kMost * inputs.q.size(0);
}

/// One call for a row, and all of it: what several give must be added up.
bool is_a_call_for_cudnn(const FusedChoice& choice, int64_t rows) {
  const auto is_one = [](const FusedSegment& segment) {
    return segment.is_full() || segment.keys.size() == segment.queries.size();
  };
  return !choice.why_blocked && choice.flash.empty() &&
         std::ssize(choice.cudnn) <= rows &&
         std::ranges::all_of(choice.cudnn, is_one);
}

}  // namespace

FusedChoice FusedChoice::of(const AttentionInputs& inputs,
                            std::span<const KeyLines> lines) {
  const auto reason = why_not(
      "hopper", [&] { return longspan::why_not_hopper(inputs, lines); });
  return reason ? FusedChoice::of_torch(inputs, lines, *reason) : FusedChoice{};
}

FusedChoice FusedChoice::of_backward(const AttentionInputs& inputs,
                                     std::span<const KeyLines> lines,
                                     bool is_all) {
  const auto reason =
      why_not("hopper", [&] { return why_not_hopper_backward(inputs, lines); });
  if (reason) return FusedChoice::of_torch(inputs, lines, *reason);
  // A call that is all there is cuDNN makes faster (bench/dense_gpu.py), a part
  // that is added to others it does not (bench/ring_share.py).
  if (is_all && wanted_kernel().empty() &&
      may_be_a_call_for_cudnn(inputs, lines)) {
    FusedChoice choice =
        FusedChoice::of_torch(inputs, lines, "cuDNN is faster");
    if (is_a_call_for_cudnn(choice, inputs.q.size(0))) return choice;
  }
  return {};
}

FusedChoice FusedChoice::of_torch(const AttentionInputs& inputs,
                                  std::span<const KeyLines> lines,
                                  std::string why_not_hopper) {
  FusedChoice choice;
  choice.why_not_hopper = std::move(why_not_hopper);
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
  const ProfilerRange range(
      [&] { return "kernel attend, " + choice.to_string(); });
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
  const auto choice = FusedChoice::of_backward(inputs, lines, gradients.is_all);
  const ProfilerRange range(
      [&] { return "kernel attend backward, " + choice.to_string(); });
  if (!choice.why_not_hopper) {
    attend_tiles_backward_hopper(inputs, lines, answer, gradients);
    return;
  }
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
