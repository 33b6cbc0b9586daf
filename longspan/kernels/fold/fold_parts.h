#pragma once

#include <optional>
#include <string>

#include "longspan/kernels/common/element.h"

namespace longspan {

/// Folds answers over different keys into one, on a CUDA device, in one pass
/// over memory: the arrays are [rows, tokens, heads, channels].
///
/// With logs it merges attention: outputs are weighted by exp(lse), natural,
/// -inf where no key was seen. Without them it adds.
struct FoldPartsArgs {
  static constexpr int kMostParts = 8;

  /// What is folded in: all rows, and the tokens [first, first + tokens).
  struct Part {
    int64_t first = 0, tokens = 0;
    TokenArray<const void*> out = {};
    TokenArray<const float*> lse = {};  // null: add
  };

  int64_t rows = 0, tokens = 0, heads = 0;
  int channels = 0;
  TokenArray<const float*> before = {};  // null: nothing yet
  TokenArray<const float*> before_lse =
      {};  // with `before`, when parts have it
  int count = 0;
  ElementType part_type = ElementType::float32;  // of all; not float64
  Part parts[kMostParts] = {};
  /// Written for every token; may be the memory of `before`.
  ElementType type = ElementType::float32;  // not float64
  TokenArray<void*> out = {};
  TokenArray<float*> lse = {};  // null: add
};

/// Why it cannot run here, or nothing.
std::optional<std::string> why_not_fold_parts();

/// `stream` is a cudaStream_t of the current device. Throws std::runtime_error
/// when the launch fails.
void fold_parts(const FoldPartsArgs& args, void* stream);

}  // namespace longspan
