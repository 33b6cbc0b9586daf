#pragma once

#include <cstdint>

#include "longspan/kernels/attend_selected/attend_selected.h"

namespace longspan {

/// What one query sees of one key head: its list without the empty slots.
struct SelectedKeys {
  int64_t row = 0, query = 0, key_head = 0;
  const int32_t* keys = nullptr;  // of [0, args.keys)
  int64_t count = 0;
};

/// Slots of a query are padded to this in what backward keeps of them.
inline constexpr int64_t kSlotStep = 32;

/// The arithmetic of one query and one key head, all of its query heads.
/// Scratch is aligned to 64 bytes and belongs to one thread during a call.
struct SelectedForwardSteps {
  int64_t (*scratch_bytes)(const SelectedAttentionArgs& args);
  void (*run)(const SelectedForwardArgs& args, const SelectedKeys& list,
              void* scratch);
};

/// `weights` are those of the list, one after another.
struct SelectedWeightsSteps {
  int64_t (*scratch_bytes)(const SelectedAttentionArgs& args);
  void (*run)(const SelectedWeightsArgs& args, const SelectedKeys& list,
              void* weights, void* scratch);
};

/// Derivatives in two steps. `take_query` writes dq and leaves what keys need:
/// the query's side once, and a row of weights for each slot. `add_to_keys`
/// adds a part of the list to dkv, with the rows of that part.
struct SelectedBackwardSteps {
  int64_t (*scratch_bytes)(const SelectedAttentionArgs& args);  // of either
  int64_t (*query_bytes)(const SelectedAttentionArgs& args);
  int64_t (*slot_bytes)(const SelectedAttentionArgs& args);
  /// Writes rows up to a multiple of kSlotStep.
  void (*take_query)(const SelectedBackwardArgs& args, const SelectedKeys& list,
                     void* query_side, void* slot_rows, void* scratch);
  /// May read up to 16 rows from any row of the part on.
  void (*add_to_keys)(const SelectedBackwardArgs& args,
                      const SelectedKeys& part, const void* query_side,
                      const void* slot_rows, void* scratch);
};

/// One instruction set's arithmetic for one type of elements.
struct SelectedSteps {
  SelectedForwardSteps forward;
  SelectedWeightsSteps weights;
  SelectedBackwardSteps backward;
};

/// By ElementType.
struct SelectedStepsOfTypes {
  SelectedSteps of[4];
};

// Each lives in a source of its own, compiled for its instruction set, as the
// tables of attention/cpu/steps.h do.
extern const SelectedStepsOfTypes kPortableSelectedSteps;
#ifdef LONGSPAN_X86_KERNELS
extern const SelectedStepsOfTypes kAvx2SelectedSteps;
extern const SelectedStepsOfTypes kAvx512SelectedSteps;
// Of bfloat16.
extern const SelectedSteps kAvx512Bf16SelectedSteps;
extern const SelectedSteps kAmxSelectedSteps;
#endif

/// Cut the work into jobs, the same ones for any number of threads.
void run_selected_forward(const SelectedSteps& steps,
                          const SelectedForwardArgs& args,
                          const ParallelFor& parallel_for);
void run_selected_weights(const SelectedSteps& steps,
                          const SelectedWeightsArgs& args,
                          const ParallelFor& parallel_for);
void run_selected_backward(const SelectedSteps& steps,
                           const SelectedBackwardArgs& args,
                           const ParallelFor& parallel_for);

/// The kernels of a level whose steps are `types`, but for bfloat16 those of
/// `of_bfloat16` where it has some.
template <const SelectedStepsOfTypes& types,
          const SelectedSteps* of_bfloat16 = nullptr>
struct SelectedLevel {
  static const SelectedSteps& steps(const SelectedAttentionArgs& args) {
    if (of_bfloat16 != nullptr && args.type == ElementType::bfloat16) {
      return *of_bfloat16;
    }
    return types.of[static_cast<int>(args.type)];
  }
  static void forward(const SelectedForwardArgs& args,
                      const ParallelFor& parallel_for) {
    run_selected_forward(steps(args), args, parallel_for);
  }
  static void backward(const SelectedBackwardArgs& args,
                       const ParallelFor& parallel_for) {
    run_selected_backward(steps(args), args, parallel_for);
  }
  static void weights(const SelectedWeightsArgs& args,
                      const ParallelFor& parallel_for) {
    run_selected_weights(steps(args), args, parallel_for);
  }
};

template <const SelectedStepsOfTypes& types,
          const SelectedSteps* of_bfloat16 = nullptr>
SelectedAttentionKernels selected_kernels() {
  using Level = SelectedLevel<types, of_bfloat16>;
  return {.forward = Level::forward,
          .backward = Level::backward,
          .weights = Level::weights};
}

}  // namespace longspan
