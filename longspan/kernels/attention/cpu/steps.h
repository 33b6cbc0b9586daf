#pragma once

#include <cstdint>

#include "longspan/kernels/attention/attention.h"
#include "longspan/kernels/attention/cpu/blocks.h"
#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Where a block of keys adds its derivatives: row i of a block is its key i.
struct KeyGradients {
  void *dk = nullptr, *dv = nullptr;  // of the block's first key
  int64_t dk_stride = 0, dv_stride = 0;
};

/// The arithmetic of one pass over the keys of a query block. `start` packs
/// the queries into `scratch`, `add_keys` takes one block of keys, `finish`
/// hands over what was summed. Scratch is aligned to 64 bytes and belongs to
/// one thread between start and finish.
struct ForwardSteps {
  int64_t (*scratch_bytes)(const AttentionArgs& args, int heads);
  void (*start)(const AttentionForwardArgs& args, const QueryBlock& queries,
                void* scratch);
  void (*add_keys)(const AttentionForwardArgs& args, const QueryBlock& queries,
                   const KeyBlock& keys, void* scratch);
  void (*finish)(const AttentionForwardArgs& args, const QueryBlock& queries,
                 void* scratch);
};

/// The steps of the backward pass, one query head at a time.
struct BackwardSteps {
  int64_t (*scratch_bytes)(const AttentionArgs& args);
  void (*start)(const AttentionBackwardArgs& args, const QueryBlock& queries,
                void* scratch);
  void (*add_keys)(const AttentionBackwardArgs& args, const QueryBlock& queries,
                   const KeyBlock& keys, const KeyGradients& gradients,
                   void* scratch);
  void (*finish)(const AttentionBackwardArgs& args, const QueryBlock& queries,
                 void* scratch);
};

/// One instruction set's arithmetic, by ElementType.
struct AttentionSteps {
  ForwardSteps forward[4];
  BackwardSteps backward[4];
};

// Each lives in a source of its own, compiled for its instruction set. Those
// sources hold arithmetic only: the linker might pick their copy of anything
// shared with other sources, and run it on a CPU without these instructions.
extern const AttentionSteps kPortableSteps;
#ifdef LONGSPAN_X86_KERNELS
extern const AttentionSteps kAvx2Steps;
extern const AttentionSteps kAvx512Steps;
#endif

/// Cut the work into jobs, the same ones for any number of threads.
void run_forward(const AttentionSteps& steps, const AttentionForwardArgs& args,
                 const ParallelFor& parallel_for);
void run_backward(const AttentionSteps& steps,
                  const AttentionBackwardArgs& args,
                  const ParallelFor& parallel_for);

}  // namespace longspan
