#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/attention.h"

namespace longspan {

/// Folds an answer over other keys into a running one, on a CUDA device:
/// [rows, tokens, heads] queries, natural logs, -inf where no key was seen.
struct MergePartialsArgs {
  int64_t rows = 0, tokens = 0, heads = 0;
  int channels = 0;
  TokenArray<float*> out;                        // read and written
  TokenArray<float*> lse;                        // read and written
  ElementType part_type = ElementType::float32;  // not float64
  TokenArray<const void*> part_out;
  TokenArray<const float*> part_lse;
};

/// Why it cannot run here, or nothing.
std::optional<std::string> why_not_merge_partials();

/// `stream` is a cudaStream_t of the current device. Throws std::runtime_error
/// when the launch fails.
void merge_partials(const MergePartialsArgs& args, void* stream);

}  // namespace longspan
