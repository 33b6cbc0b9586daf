#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/selected_attention.h"

namespace longspan::ampere {

/// Attention to listed keys, as selected_attention.h promises it, on any CUDA
/// device since Ampere: bfloat16 or float16, any number of heads and key heads,
/// channels and values a multiple of 8 and at most 576. For what faster kernels
/// refuse. Nothing is allocated and nobody waits. `stream` is a cudaStream_t of
/// the current device.

/// Why the kernel cannot take it, or nothing.
std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& args);

/// The same bits every time.
void selected_attention_forward(const SelectedForwardArgs& args, void* stream);

}  // namespace longspan::ampere
