#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::hopper {

/// The lightning indexer and an exact selection, as ../select_keys.h promises
/// them, on a Hopper device. Nothing is allocated, the host never waits, and a
/// graph may capture it. `stream` is a cudaStream_t of the current device.

/// Why the kernel cannot take it, or nothing.
std::optional<std::string> why_not_select_keys(const SelectKeysArgs& args);

/// Scratch that select_keys wants, at most 63 MB below 15 million keys; half
/// of that where the answer is long: the place of its last lists then holds
/// scores until their turn comes.
size_t select_keys_workspace(const SelectKeysArgs& args);

/// `workspace` is device memory at a multiple of 16 bytes, free again when what
/// was launched is done.
void select_keys(const SelectKeysArgs& args, void* workspace, void* stream);

}  // namespace longspan::hopper
