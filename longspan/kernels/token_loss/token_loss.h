#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "longspan/kernels/common/element.h"
#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// How the logits of a token become its loss.
struct TokenLossOptions {
  double scale = 1;
  double softcap = 0;  ///< 0: none
  double smoothing = 0;
  double z_loss = 0;
  int64_t ignored = -100;
};

/// Cross entropy of some tokens from their logits. T is float or double; arrays
/// are contiguous.
///
///   s = (logits + bias) * scale
///   x = s, or softcap * tanh(s / softcap)
///   lse = log sum exp(x)
///   loss = lse - (1 - smoothing) x[label] - smoothing mean(x) + z_loss lse^2
///   entropy = lse - sum softmax(x) x
///   right: x[label] is the greatest, and none of the same value comes before
///
/// and its derivative to the logits, times the token's weight. Where the label
/// is `ignored` everything is 0; another one outside of the words makes it all
/// NaN. A logit of -inf is a word that cannot come.
template <class T>
struct TokenLossArgs {
  int64_t tokens = 0, words = 0;
  TokenLossOptions options = {};
  T* logits = nullptr;              // [tokens, words]; kernels on the CPU write
  const T* bias = nullptr;          // [words], or null
  const int64_t* labels = nullptr;  // [tokens]
  const T* weight = nullptr;        // [tokens], or null: 1
  T* loss = nullptr;                // [tokens]
  T* lse = nullptr;                 // [tokens]
  T* entropy = nullptr;             // [tokens]
  bool* right = nullptr;            // [tokens]
  /// Whether the derivative is wanted: on the CPU in the place of the logits,
  /// on a device in `gradient`, [tokens, words] of `gradient_type`.
  bool with_gradient = false;
  void* gradient = nullptr;
  ElementType gradient_type = ElementType::float32;
};

/// The arithmetic of one instruction set, for tokens [begin, end).
struct TokenLossSteps {
  void (*of_floats)(const TokenLossArgs<float>& args, int64_t begin,
                    int64_t end);
  void (*of_doubles)(const TokenLossArgs<double>& args, int64_t begin,
                     int64_t end);
};

extern const TokenLossSteps kPortableTokenLoss;
#ifdef LONGSPAN_X86_KERNELS
extern const TokenLossSteps kAvx2TokenLoss;
extern const TokenLossSteps kAvx512TokenLoss;
#endif

/// By the chosen level. The bits do not depend on the number of threads.
void token_losses(const TokenLossArgs<float>& args,
                  const ParallelFor& parallel);
void token_losses(const TokenLossArgs<double>& args,
                  const ParallelFor& parallel);

// ---- The same on a CUDA device; `stream` is a cudaStream_t of the current
// one.

/// Why it cannot run here, or nothing.
std::optional<std::string> why_not_token_losses();

/// Gradients of floats may be float32, bfloat16 or float16, those of doubles
/// are float64. The same bits in every run.
void token_losses(const TokenLossArgs<float>& args, void* stream);
void token_losses(const TokenLossArgs<double>& args, void* stream);

}  // namespace longspan
