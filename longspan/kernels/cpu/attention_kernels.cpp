#include <vector>

#include "longspan/kernels/attention.h"
#include "longspan/kernels/cpu/attention_steps.h"
#include "longspan/kernels/cpu/bf16/steps.h"

namespace longspan {

namespace {

template <const AttentionSteps& steps>
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
  };
}

#ifdef LONGSPAN_X86_KERNELS
/// Those that have products of bfloat16; other types run as with AVX-512.
template <const PanelSteps& steps>
AttentionKernels bf16_kernels_named(std::string_view name) {
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
  };
}
#endif

std::vector<AttentionKernels> runnable_kernels() {
  std::vector kernels{kernels_named<kPortableSteps>("portable")};
#ifdef LONGSPAN_X86_KERNELS
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2) kernels.push_back(kernels_named<kAvx2Steps>("avx2"));
  if (avx512) kernels.push_back(kernels_named<kAvx512Steps>("avx512"));
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16) {
    kernels.push_back(bf16_kernels_named<kAvx512Bf16Steps>("avx512_bf16"));
  }
  if (bf16 && amx_is_usable()) {
    kernels.push_back(bf16_kernels_named<kAmxSteps>("amx"));
  }
#endif
  return kernels;
}

}  // namespace

std::span<const AttentionKernels> attention_kernels() {
  static const std::vector<AttentionKernels> kernels = runnable_kernels();
  return kernels;
}

}  // namespace longspan
