#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan::ampere {

/// The lightning indexer, as ../select_keys.h promises it, on any CUDA device
/// since Ampere: bfloat16 or float16, any number of heads whose queries fit
/// shared memory, channels a multiple of 8 and at most 256. Nothing is
/// allocated and the host never waits, so a CUDA graph may capture it.
/// `stream` is a cudaStream_t of the current device.

/// Why a kernel cannot take it, or nothing.
std::optional<std::string> why_not_select_keys(const SelectKeysArgs& args);
std::optional<std::string> why_not_score_selected(
    const ScoreSelectedArgs& args);
std::optional<std::string> why_not_score_selected_backward(
    const ScoreSelectedBackwardArgs& args);

/// Scratch that select_keys wants, at most 34 MB below 8 million keys.
size_t select_keys_workspace(const SelectKeysArgs& args);

/// `workspace` is device memory at a multiple of 16 bytes, free again when what
/// was launched is done.
void select_keys(const SelectKeysArgs& args, void* workspace, void* stream);

/// Scores have the bits that this select_keys gives them.
void score_selected(const ScoreSelectedArgs& args, void* stream);

/// `args.dq` is of q's type here. dq and dweights have the same bits every
/// time; dk is added to in the order of arrival. The derivatives of products
/// are rounded to q's type before they are multiplied with q and k, which adds
/// the usual rounding error of such a product.
void score_selected_backward(const ScoreSelectedBackwardArgs& args,
                             void* stream);

}  // namespace longspan::ampere
