#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace longspan {

/// One of several kernels for the same work on CUDA. `why_not` says why it
/// cannot take some arguments, or nothing.
template <class Shape, class Run>
struct CudaKernel {
  std::string_view name;
  std::optional<std::string> (*why_not)(const Shape& args);
  Run run;
};

/// Why our kernels do not run while torch is told to be deterministic (they add
/// to keys in any order, torch's operators can keep one), or nothing.
std::optional<std::string> why_not_unordered();

/// The first kernel of a list that takes the arguments; nullptr for none.
template <class Kernel, size_t count, class Args>
const Kernel* first_able(const Kernel (&kernels)[count], const Args& args) {
  for (const Kernel& kernel : kernels) {
    if (!kernel.why_not(args)) return &kernel;
  }
  return nullptr;
}

/// The name of the first kernel that takes the arguments, "torch" for none, and
/// why none before it does: "ampere, not hopper: elements are not bfloat16".
template <class Kernel, size_t count, class Args>
std::string describe_first_able(const Kernel (&kernels)[count],
                                const Args& args) {
  std::string reasons;
  for (const Kernel& kernel : kernels) {
    const auto reason = kernel.why_not(args);
    if (!reason) return std::string(kernel.name) + reasons;
    reasons += reasons.empty() ? ", not " : "; not ";
    reasons += std::string(kernel.name) + ": " + *reason;
  }
  return "torch" + reasons;
}

}  // namespace longspan
