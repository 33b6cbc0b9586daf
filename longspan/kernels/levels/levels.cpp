#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/attend_selected/cpu/steps.h"
#include "longspan/kernels/attention/cpu/steps.h"
#include "longspan/kernels/levels/bf16_levels.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

namespace longspan {

namespace {

template <const AttentionSteps& steps, const SelectedStepsOfTypes& selected,
          const KeySelectionSteps& selection, const TokenLossSteps& token_loss>
AttentionKernels kernels_named(std::string_view name) {
  return {
      .name = name,
      .forward =
          [](const AttentionForwardArgs& args,
             const ParallelFor& parallel_for) {
            run_forward(steps, args, parallel_for);
          },
      .backward =
          [](const AttentionBackwardArgs& args,
             const ParallelFor& parallel_for) {
            run_backward(steps, args, parallel_for);
          },
      .selected = selected_kernels<selected>(),
      .selection = selection_kernels<selection>(),
      .token_loss = token_loss,
  };
}

/// Whose code a level runs for elements of a type.
std::string_view code_of(std::string_view level, ElementType type) {
  const bool bf16_only = level == "avx512_bf16" || level == "amx";
  return bf16_only && type != ElementType::bfloat16 ? "avx512" : level;
}

std::string nothing() {
  return "";
}

#ifdef LONGSPAN_X86_KERNELS
std::string why_not_avx2() {
  const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has ? "" : "this CPU has no AVX2 with FMA";
}

std::string why_not_avx512() {
  const bool has =
      why_not_avx2().empty() && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has ? "" : "this CPU has no AVX-512 (F, BW, DQ, VL)";
}

std::string why_not_bf16() {
  const std::string why_not = why_not_avx512();
  return why_not.empty() ? why_not_avx512_bf16() : why_not;
}

std::string why_not_tiles() {
  const std::string why_not = why_not_bf16();
  return why_not.empty() ? why_not_amx() : why_not;
}
#endif

/// The table of levels, the best last. A level that needs another asks its
/// why_not first.
struct Level {
  AttentionKernels kernels;
  std::string (*why_not)();
};

std::vector<Level> levels() {
  std::vector<Level> all{
      {kernels_named<kPortableSteps, kPortableSelectedSteps, kPortableSelection,
                     kPortableTokenLoss>("portable"),
       nothing}};
#ifdef LONGSPAN_X86_KERNELS
  all.push_back({kernels_named<kAvx2Steps, kAvx2SelectedSteps, kAvx2Selection,
                               kAvx2TokenLoss>("avx2"),
                 why_not_avx2});
  all.push_back({kernels_named<kAvx512Steps, kAvx512SelectedSteps,
                               kAvx512Selection, kAvx512TokenLoss>("avx512"),
                 why_not_avx512});
  const Level bf16{avx512_bf16_kernels(), why_not_bf16};
  // Intel's CPUs multiply pairs of bfloat16 no faster than two floats, so that
  // converting is better: 94 against 78 GFLOP/s on Sapphire Rapids.
  all.insert(__builtin_cpu_is("intel") ? all.end() - 1 : all.end(), bf16);
  all.push_back({amx_kernels(), why_not_tiles});
#endif
  return all;
}

struct KernelTable {
  std::vector<KernelLevel> levels;
  std::vector<AttentionKernels> runnable;
};

const KernelTable& kernel_table() {
  static const KernelTable table = [] {
#ifdef LONGSPAN_X86_KERNELS
    __builtin_cpu_init();
#endif
    KernelTable made;
    for (const Level& level : levels()) {
      made.levels.push_back({level.kernels.name, level.why_not()});
      if (made.levels.back().why_not.empty()) {
        made.runnable.push_back(level.kernels);
      }
    }
    return made;
  }();
  return table;
}

std::string runnable_names() {
  std::string names;
  for (const AttentionKernels& kernels : attention_kernels()) {
    names += (names.empty() ? "" : ", ") + std::string(kernels.name);
  }
  return names;
}

}  // namespace

std::span<const KernelLevel> kernel_levels() {
  return kernel_table().levels;
}

std::span<const AttentionKernels> attention_kernels() {
  return kernel_table().runnable;
}

const AttentionKernels& attention_kernels_named(std::string_view name,
                                                std::string_view asker) {
  for (const AttentionKernels& kernels : attention_kernels()) {
    if (kernels.name == name) return kernels;
  }
  std::string reason = "no kernel has that name";
  for (const KernelLevel& level : kernel_levels()) {
    if (level.name == name) reason = level.why_not;
  }
  throw std::invalid_argument(join(asker, ": `", name, "`, but ", reason,
                                   "; this CPU can run ", runnable_names()));
}

const AttentionKernels& chosen_attention_kernels() {
  static const std::string wanted = [] {
    const char* const value = std::getenv("LONGSPAN_CPU_KERNEL");
    return std::string(value == nullptr ? "" : value);
  }();
  if (wanted.empty()) return attention_kernels().back();
  static const AttentionKernels& chosen =
      attention_kernels_named(wanted, "LONGSPAN_CPU_KERNEL");
  return chosen;
}

std::string describe_chosen_kernels(ElementType type) {
  const AttentionKernels& chosen = chosen_attention_kernels();
  const std::string_view name = code_of(chosen.name, type);
  const std::string_view best = code_of(attention_kernels().back().name, type);
  if (name != best) {
    return join(name, ", not ", best, ": LONGSPAN_CPU_KERNEL asks for ",
                chosen.name);
  }
  const std::string_view top = code_of(kernel_levels().back().name, type);
  const auto level =
      std::ranges::find(kernel_levels(), top, &KernelLevel::name);
  return level->why_not.empty()
             ? std::string(name)
             : join(name, ", not ", top, ": ", level->why_not);
}

}  // namespace longspan
