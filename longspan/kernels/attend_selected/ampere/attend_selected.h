#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/attend_selected/attend_selected.h"

namespace longspan::ampere {

/// Attention to listed keys, as ../attend_selected.h promises it, on any CUDA
/// device since Ampere: bfloat16 or float16, any number of heads and key heads,
/// channels and values a multiple of 8 and at most 576. For calls that faster
/// kernels refuse. Nothing is allocated and the host never waits. `stream` is a
/// cudaStream_t of the current device.
///
/// The forward and weights kernels give the same bits every time, and so does
/// the backward kernel for `dq`; it adds to `dkv` in the order in which blocks
/// finish.

/// Why the kernels cannot take it, or nothing.
std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& args);

void selected_attention_forward(const SelectedForwardArgs& args, void* stream);

/// Why the backward kernel cannot take it, or nothing: it also wants `dout`,
/// `dq` and `dkv` aligned to 16 bytes.
std::optional<std::string> why_not_attend_selected_backward(
    const SelectedBackwardArgs& args);

void selected_attention_backward(const SelectedBackwardArgs& args,
                                 void* stream);

/// `why_not_attend_selected` says what it refuses. Sums over heads in order.
void selected_weights(const SelectedWeightsArgs& args, void* stream);

}  // namespace longspan::ampere
