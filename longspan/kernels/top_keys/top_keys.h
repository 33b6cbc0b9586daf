#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan {

/// An exact selection, as select_keys.h promises it, from float32 scores on
/// any CUDA device since Ampere. Nothing is allocated, the host never waits.
/// `stream` is a cudaStream_t of the current device.

/// Why the kernel cannot take it, or nothing.
std::optional<std::string> why_not_top_keys(const TopKeysArgs& args);

void top_keys(const TopKeysArgs& args, void* stream);

}  // namespace longspan
