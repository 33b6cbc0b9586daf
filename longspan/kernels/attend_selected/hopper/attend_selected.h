#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "longspan/kernels/attend_selected/attend_selected.h"

namespace longspan::hopper {

/// Attention to listed keys, as ../attend_selected.h promises it, on a Hopper
/// device: bfloat16, one key head, 512 or 576 channels with values of 512. Any
/// number of heads, in blocks of 64. Nothing is allocated, the host never waits
/// and a graph may capture it. `stream` is a cudaStream_t of the device in use.
///
/// The forward kernel gives the same bits every time; the backward kernel adds
/// to `dkv` in the order in which blocks finish.

/// Why the kernels cannot take it, or nothing.
std::optional<std::string> why_not_attend_selected(
    const SelectedAttentionArgs& args);

void selected_attention_forward(const SelectedForwardArgs& args, void* stream);

void selected_attention_backward(const SelectedBackwardArgs& args,
                                 void* stream);

/// Why selected_weights cannot take it, or nothing. It reads no values.
std::optional<std::string> why_not_selected_weights(
    const SelectedWeightsArgs& args);

/// Gives the same bits every time.
void selected_weights(const SelectedWeightsArgs& args, void* stream);

/// delta[h] = sum over channels of out * dout, as the backward kernel wants it.
struct OutputDeltaArgs {
  ElementType type = ElementType::bfloat16;  // or float16, of out and dout
  int64_t rows = 0, queries = 0, heads = 0;
  int value_dim = 0;            // a multiple of 8
  TokenArray<const void*> out;  // [rows, queries, heads, value_dim]
  TokenArray<const void*> dout;
  TokenArray<float*> delta;  // [rows, queries, heads]
};
void output_delta(const OutputDeltaArgs& args, void* stream);

}  // namespace longspan::hopper
