#pragma once

#include <cstdint>

#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Threads for kernels on the CPU: as many as torch would use, but no more than
/// `most`; one inside a parallel region of torch. Not at::parallel_for, which
/// runs on one thread in code that was compiled without OpenMP, nor OpenMP
/// itself, of whose runtime torch brings a copy of its own.
///
/// Threads start with the call and end with it: that costs some 20
/// microseconds for each, and in return there is nothing to keep alive over
/// fork, at exit, or between the ranks of a process.
ParallelFor torch_threads(int64_t most = INT64_MAX);

/// As many threads as so many multiplications justify: a few million for each
/// thread.
ParallelFor threads_for(int64_t multiplications);

}  // namespace longspan
