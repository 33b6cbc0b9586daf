#include <stdexcept>

#include "longspan/kernels/common/ampere/checks.h"
#include "longspan/kernels/top_keys/ampere/top_keys.cuh"
#include "longspan/kernels/top_keys/top_keys.h"

namespace longspan {

namespace {

template <int kThreads>
cudaError_t launch_rows(const TopKeysParams& params, bool follows,
                        cudaStream_t stream) {
  return launch_after(top_keys_kernel<kThreads>, params.chunk, kThreads,
                      sizeof(typename TopPlan<kThreads>::Shared), follows,
                      stream, params);
}

}  // namespace

/// With few queries, all threads of a processor work on one; with many, four
/// blocks hide each other's waiting.
cudaError_t launch_top_keys(const TopKeysParams& params, int processors,
                            bool follows, cudaStream_t stream) {
  if (params.chunk <= processors) {
    return launch_rows<1024>(params, follows, stream);
  }
  return params.chunk <= 3 * processors
             ? launch_rows<512>(params, follows, stream)
             : launch_rows<256>(params, follows, stream);
}

std::optional<std::string> why_not_top_keys(const TopKeysArgs& args) {
  if (args.type != ElementType::float32) return "scores are not float32";
  if (!fits_32_bits(args.queries) || !fits_32_bits(args.keys) ||
      !fits_32_bits(args.slots)) {
    return "more than 2^30 queries, keys or slots";
  }
  if (reinterpret_cast<uintptr_t>(args.scores) % 16 != 0 ||
      args.stride % 4 != 0) {
    return "scores are not aligned to 16 bytes";
  }
  return why_not_since(80);
}

void top_keys(const TopKeysArgs& args, void* stream) {
  if (args.queries * args.slots == 0) return;
  if (const auto reason = why_not_top_keys(args)) {
    throw std::invalid_argument("top_keys: " + *reason);
  }
  check_launch("top_keys",
               launch_top_keys(TopKeysParams(args), processor_count(), false,
                               static_cast<cudaStream_t>(stream)));
}

}  // namespace longspan
