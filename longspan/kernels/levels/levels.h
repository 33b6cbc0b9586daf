#pragma once

#include <span>
#include <string>
#include <string_view>

#include "longspan/kernels/attend_selected/attend_selected.h"
#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/common/parallel.h"
#include "longspan/kernels/select_keys/select_keys.h"

namespace longspan {

/// One implementation of both directions. The same bits for any number of
/// threads, and for any split of the keys into calls up to rounding.
///
/// Infinities and NaNs reach exactly those who see them, in both directions. A
/// query whose visible scores are all -inf has seen no key; one whose lse is
/// infinite moves no derivative.
struct AttentionKernels {
  std::string_view name;
  void (*forward)(const AttentionForwardArgs& args,
                  const ParallelFor& parallel_for);
  void (*backward)(const AttentionBackwardArgs& args,
                   const ParallelFor& parallel_for);
  SelectedAttentionKernels selected = {};
  KeySelectionKernels selection = {};
};

/// A level of instructions that this build has kernels for.
struct KernelLevel {
  std::string_view name;
  std::string why_not;  ///< it cannot run here, or nothing
};

/// All of them, the best last; "portable" is always first and always runs.
std::span<const KernelLevel> kernel_levels();

/// Those that this CPU can run, in the same order.
std::span<const AttentionKernels> attention_kernels();

/// The one of a name. Throws where this CPU cannot run it or nothing has that
/// name; `asker` speaks.
const AttentionKernels& attention_kernels_named(std::string_view name,
                                                std::string_view asker);

/// What attention on the CPU runs: the level that the environment variable
/// LONGSPAN_CPU_KERNEL names, which is read once, or the best. Throws as above.
const AttentionKernels& chosen_attention_kernels();

/// Whose code runs for elements of a type, and why none better: "avx512",
/// "avx2, not avx512: this CPU has no AVX-512", "portable, not avx512:
/// LONGSPAN_CPU_KERNEL asks for portable".
std::string describe_chosen_kernels(ElementType type);

}  // namespace longspan
