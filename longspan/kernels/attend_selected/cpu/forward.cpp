#include <cstring>
#include <vector>

#include "longspan/kernels/attend_selected/cpu/jobs.h"
#include "longspan/kernels/common/cpu/jobs.h"

namespace longspan {

namespace {

/// Calls run(list, scratch) for every item, its list filled in.
template <class Run>
void for_each_list(const SelectedAttentionArgs& args, int64_t scratch_bytes,
                   const ParallelFor& parallel_for, const Run& run) {
  const int64_t items = selected_items(args);
  if (items == 0) return;
  parallel_for(items, 1, [&](int64_t begin, int64_t end) {
    const AlignedBytes scratch(scratch_bytes);
    std::vector<int32_t> keys(static_cast<std::size_t>(args.slots) + 1);
    for (int64_t i = begin; i < end; ++i) {
      SelectedKeys list = item_of(args, from_both_ends(i, items));
      list.keys = keys.data();
      list.count = copy_keys(args, slots_of(args, list), keys.data());
      run(list, scratch.data());
    }
  });
}

}  // namespace

void run_selected_forward(const SelectedSteps& steps,
                          const SelectedForwardArgs& args,
                          const ParallelFor& parallel_for) {
  for_each_list(args, steps.forward.scratch_bytes(args), parallel_for,
                [&](const SelectedKeys& list, void* scratch) {
                  steps.forward.run(args, list, scratch);
                });
}

void run_selected_weights(const SelectedSteps& steps,
                          const SelectedWeightsArgs& args,
                          const ParallelFor& parallel_for) {
  const auto bytes = static_cast<std::size_t>(accumulator_bytes(args.type));
  const auto slots = static_cast<std::size_t>(args.slots);
  // The weights of a list wait behind the scratch for their slots.
  const int64_t scratch_bytes = (steps.weights.scratch_bytes(args) + 63) & ~63;
  for_each_list(args, scratch_bytes + args.slots * accumulator_bytes(args.type),
                parallel_for, [&](const SelectedKeys& list, void* scratch) {
                  std::byte* weights =
                      static_cast<std::byte*>(scratch) + scratch_bytes;
                  steps.weights.run(args, list, weights, scratch);
                  const int32_t* const from = slots_of(args, list);
                  std::byte* to = static_cast<std::byte*>(args.weights.data) +
                                  (list.row * args.weights.row_stride +
                                   list.query * args.weights.token_stride +
                                   list.key_head * args.weights.head_stride) *
                                      accumulator_bytes(args.type);
                  for (std::size_t i = 0; i < slots; ++i, to += bytes) {
                    if (is_key(args, from[i])) {
                      std::memcpy(to, weights, bytes);
                      weights += bytes;
                    } else {
                      std::memset(to, 0, bytes);
                    }
                  }
                });
}

}  // namespace longspan
