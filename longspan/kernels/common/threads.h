#pragma once

#include <thread>
#include <vector>

#include "longspan/kernels/common/parallel.h"

namespace longspan {

/// Starts `threads` threads for each call, each with one run of items: for
/// programs without a thread pool of their own.
inline ParallelFor on_threads(int64_t threads) {
  if (threads <= 1) return serial_for;
  return [=](int64_t items, int64_t /*grain*/, const auto& body) {
    std::vector<std::thread> running;
    for (int64_t t = 0; t < threads; ++t) {
      const int64_t begin = items * t / threads;
      const int64_t end = items * (t + 1) / threads;
      if (begin < end) running.emplace_back([=, &body] { body(begin, end); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

}  // namespace longspan
