#include "longspan/kernels/levels/bf16_levels.h"

#ifdef LONGSPAN_X86_KERNELS

#include <cpuid.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "longspan/kernels/attend_selected/cpu/steps.h"
#include "longspan/kernels/attention/cpu/bf16/steps.h"
#include "longspan/kernels/select_keys/cpu/steps.h"

namespace longspan {

namespace {

template <const PanelSteps& steps, const SelectedSteps& selected,
          const KeyScoreSteps& scores>
AttentionKernels kernels_named(std::string_view name) {
  return {
      .name = name,
      .forward =
          [](const AttentionForwardArgs& args,
             const ParallelFor& parallel_for) {
            if (args.type == ElementType::bfloat16) {
              run_panels_forward(steps, args, parallel_for);
            } else {
              run_forward(kAvx512Steps, args, parallel_for);
            }
          },
      .backward =
          [](const AttentionBackwardArgs& args,
             const ParallelFor& parallel_for) {
            if (args.type == ElementType::bfloat16) {
              run_panels_backward(steps, args, parallel_for);
            } else {
              run_backward(kAvx512Steps, args, parallel_for);
            }
          },
      .selected = selected_kernels<kAvx512SelectedSteps, &selected>(),
      .selection = selection_kernels<kAvx512Selection, &scores>(),
      .token_loss = kAvx512TokenLoss,
  };
}

bool cpu_has_tiles() {
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  return (d & kBf16) != 0 && (d & kTile) != 0;
}

/// Whether the system saves both parts of the tile state, their configuration
/// and their data, when it switches threads.
bool system_saves_tiles() {
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kXgetbv = 1u << 27;
  if ((c & kXgetbv) == 0) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  return (low & kTileState) == kTileState;
}

/// Tile data is large, so Linux gives a process room for it on request only.
bool system_permits_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

AttentionKernels avx512_bf16_kernels() {
  return kernels_named<kAvx512Bf16Steps, kAvx512Bf16SelectedSteps,
                       kAvx512Bf16Scores>("avx512_bf16");
}

AttentionKernels amx_kernels() {
  return kernels_named<kAmxSteps, kAmxSelectedSteps, kAmxScores>("amx");
}

std::string why_not_avx512_bf16() {
  const bool has = __builtin_cpu_supports("avx512bf16");
  return has ? "" : "this CPU has no AVX512-BF16";
}

// The leaf that describes palettes (0x1d) is not asked: some virtual machines
// leave it empty although palette 1, the only one there is, works.
std::string why_not_amx() {
  if (!cpu_has_tiles()) return "this CPU has no AMX with bfloat16";
  if (!system_saves_tiles()) return "the system does not save AMX tiles";
  if (!system_permits_tiles()) return "the system does not permit AMX tiles";
  return "";
}

}  // namespace longspan

#endif
