#pragma once

#include <span>
#include <string>
#include <string_view>

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/common/parallel.h"
#include "longspan/kernels/select_keys/select_keys.h"
#include "longspan/kernels/token_loss/token_loss.h"

namespace longspan {

/// One implementation of both directions. Any number of threads gives the same
/// bits; other splits of the keys into calls differ by rounding.
///
/// Infinities and NaNs reach exactly the queries that see them, or in backward
/// the keys. A query whose visible scores are all -inf has seen no key; one
/// whose lse is infinite passes no gradient.
struct AttentionKernels {
  std::string_view name;
  void (*forward)(const AttentionForwardArgs& args,
                  const ParallelFor& parallel_for);
  void (*backward)(const AttentionBackwardArgs& args,
                   const ParallelFor& parallel_for);
  SelectedAttentionKernels selected = {};
  KeySelectionKernels selection = {};
  TokenLossSteps token_loss = {};
};

/// A level of instructions that this build has kernels for.
struct KernelLevel {
  std::string_view name;
  std::string why_not;  ///< it cannot run here, or nothing
};

/// All levels, the best last; "portable" is always first and always runs.
std::span<const KernelLevel> kernel_levels();

/// The levels that this CPU can run, in the same order.
std::span<const AttentionKernels> attention_kernels();

/// The level with this name. Throws where no level has the name or this CPU
/// cannot run it; `asker` is named in the message.
const AttentionKernels& attention_kernels_named(std::string_view name,
                                                std::string_view asker);

/// What attention on the CPU runs: the level that the environment variable
/// LONGSPAN_CPU_KERNEL names, which is read once, or the best. Throws as above.
const AttentionKernels& chosen_attention_kernels();

/// Which level runs for a type of elements, and why none better: "avx512",
/// "avx2, not avx512: this CPU has no AVX-512", "portable, not avx512:
/// LONGSPAN_CPU_KERNEL asks for portable".
std::string describe_chosen_kernels(ElementType type);

}  // namespace longspan
