#include <vector>

#include "longspan/kernels/attention.h"
#include "longspan/kernels/cpu/attention_steps.h"

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
#endif
  return kernels;
}

}  // namespace

std::span<const AttentionKernels> attention_kernels() {
  static const std::vector<AttentionKernels> kernels = runnable_kernels();
  return kernels;
}

}  // namespace longspan
