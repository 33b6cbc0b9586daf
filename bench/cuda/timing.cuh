#pragma once

#include <cstdio>

#include "bench/cuda/timings.h"
#include "tests/kernels/cuda/device.cuh"

namespace longspan::bench {

using namespace longspan::test;

/// The median of some runs, in ms.
inline double time_ms(const std::function<void()>& run, int repeats) {
  run();
  ok(cudaDeviceSynchronize(), "warm up");
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < repeats; ++i) {
    cudaEventRecord(begin);
    run();
    cudaEventRecord(end);
    ok(cudaEventSynchronize(end), "timing");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace longspan::bench
