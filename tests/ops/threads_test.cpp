#include "longspan/ops/threads.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace longspan {
namespace {

/// torch with a number of threads, for as long as this lives.
class WithThreads {
 public:
  explicit WithThreads(int threads) : before_(at::get_num_threads()) {
    at::set_num_threads(threads);
  }
  ~WithThreads() { at::set_num_threads(before_); }
  WithThreads(const WithThreads&) = delete;
  WithThreads& operator=(const WithThreads&) = delete;

 private:
  int before_;
};

/// How often each item was given to somebody.
std::vector<int> visits(const ParallelFor& parallel_for, int64_t items,
                        int64_t grain) {
  std::vector<std::atomic<int>> counts(static_cast<std::size_t>(items));
  parallel_for(items, grain, [&](int64_t begin, int64_t end) {
    EXPECT_LT(begin, end);
    EXPECT_GE(end - begin, std::min(grain, items));
    for (int64_t i = begin; i < end; ++i) ++counts[static_cast<std::size_t>(i)];
  });
  return {counts.begin(), counts.end()};
}

TEST(Threads, VisitEveryItemOnce) {
  for (int threads : {1, 2, 5}) {
    const WithThreads torch(threads);
    for (int64_t items : {0, 1, 2, 7, 100, 1001}) {
      for (int64_t grain : {0, 1, 3, 64, 5000}) {
        for (int64_t most : {0, 1, 3, 1000}) {
          EXPECT_EQ(visits(torch_threads(most), items, grain),
                    std::vector(static_cast<std::size_t>(items), 1));
        }
      }
    }
  }
}

/// Threads that work on `parts` parts, each of which waits for the others.
std::size_t threads_used(const ParallelFor& parallel_for, int64_t parts) {
  std::mutex guard;
  std::set<std::thread::id> ids;
  parallel_for(parts, 1, [&](int64_t, int64_t) {
    {
      const std::lock_guard lock(guard);
      ids.insert(std::this_thread::get_id());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  return ids.size();
}

TEST(Threads, AreAsManyAsTorchHasAndTheCallerAllows) {
  const WithThreads torch(3);
  EXPECT_EQ(threads_used(torch_threads(), 12), 3u);
  EXPECT_EQ(threads_used(torch_threads(2), 12), 2u);
  EXPECT_EQ(threads_used(torch_threads(), 2), 2u);
  EXPECT_EQ(threads_used(torch_threads(0), 12), 1u);
}

TEST(Threads, HandAnExceptionToTheCaller) {
  const WithThreads torch(3);
  EXPECT_THROW(torch_threads()(100, 1,
                               [](int64_t begin, int64_t end) {
                                 if (begin <= 50 && 50 < end) {
                                   throw std::runtime_error("fifty");
                                 }
                               }),
               std::runtime_error);
}

TEST(Threads, ServeManyCallersAtOnce) {
  const WithThreads torch(3);
  std::vector<std::jthread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(visits(torch_threads(), 50, 1), std::vector(50, 1));
      }
    });
  }
}

}  // namespace
}  // namespace longspan
