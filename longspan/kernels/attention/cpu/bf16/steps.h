#pragma once

#include <cstdint>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/bf16/panels.h"
#include "longspan/kernels/attention/cpu/steps.h"

namespace longspan {

/// The arithmetic of bfloat16 attention on one instruction set, for a group of
/// panels: `start` packs the queries into `scratch`, `add_keys` takes one block
/// of keys, `finish` hands over what was summed. Scratch is aligned to 64 bytes
/// and belongs to one thread between start and finish; so does whatever state
/// of the CPU start sets up and finish releases.
struct PanelForwardSteps {
  int64_t (*panel_bytes)(const AttentionArgs& args);
  int64_t (*scratch_bytes)(const AttentionArgs& args, int panels);
  void (*start)(const AttentionForwardArgs& args, const PanelGroup& group,
                void* scratch);
  void (*add_keys)(const AttentionForwardArgs& args, const PanelGroup& group,
                   const SeenKeys& keys, void* scratch);
  void (*finish)(const AttentionForwardArgs& args, const PanelGroup& group,
                 void* scratch);
};

struct PanelBackwardSteps {
  int64_t (*panel_bytes)(const AttentionArgs& args);
  int64_t (*scratch_bytes)(const AttentionArgs& args, int panels);
  void (*start)(const AttentionBackwardArgs& args, const PanelGroup& group,
                void* scratch);
  void (*add_keys)(const AttentionBackwardArgs& args, const PanelGroup& group,
                   const SeenKeys& keys, const KeyGradients& gradients,
                   void* scratch);
  void (*finish)(const AttentionBackwardArgs& args, const PanelGroup& group,
                 void* scratch);
};

struct PanelSteps {
  PanelForwardSteps forward;
  PanelBackwardSteps backward;
};

#ifdef LONGSPAN_X86_KERNELS
extern const PanelSteps kAvx512Bf16Steps;
extern const PanelSteps kAmxSteps;
#endif

/// Cut the work into jobs, the same ones for any number of threads.
void run_panels_forward(const PanelSteps& steps,
                        const AttentionForwardArgs& args,
                        const ParallelFor& parallel_for);
void run_panels_backward(const PanelSteps& steps,
                         const AttentionBackwardArgs& args,
                         const ParallelFor& parallel_for);

}  // namespace longspan
