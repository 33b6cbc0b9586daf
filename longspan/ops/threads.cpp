#include "longspan/ops/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace longspan {

namespace {

/// Parts are claimed one by one: where a thread loses its core to another
/// program, the others take over its share.
constexpr int64_t kPartsPerThread = 4;

void run_on_threads(int64_t threads, int64_t parts, int64_t items,
                    const std::function<void(int64_t, int64_t)>& body) {
  std::atomic<int64_t> next = 0;
  std::mutex guard;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      for (int64_t part = next++; part < parts; part = next++) {
        body(items * part / parts, items * (part + 1) / parts);
      }
    } catch (...) {
      next = parts;
      const std::lock_guard lock(guard);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    helpers.reserve(static_cast<std::size_t>(threads - 1));
    try {
      while (std::ssize(helpers) < threads - 1) helpers.emplace_back(work);
    } catch (const std::system_error&) {
      // The system has no more threads; those there are do it.
    }
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

ParallelFor torch_threads(int64_t most) {
  return [most](int64_t items, int64_t grain,
                const std::function<void(int64_t, int64_t)>& body) {
    const int64_t shares = items / std::max<int64_t>(grain, 1);
    const int64_t allowed =
        at::in_parallel_region() ? 1 : at::get_num_threads();
    const int64_t threads = std::min({shares, most, allowed});
    if (threads <= 1) return serial_for(items, grain, body);
    run_on_threads(threads, std::min(shares, threads * kPartsPerThread), items,
                   body);
  };
}

ParallelFor threads_for(int64_t multiplications) {
  constexpr int64_t kWorthAThread = 1 << 21;
  return torch_threads(multiplications / kWorthAThread);
}

}  // namespace longspan
