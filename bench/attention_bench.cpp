// Times attend on a tiny input from C++: what Python's own time is measured
// against. Prints one JSON object; bench/attention.py makes the table.

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "longspan/attention/attend.h"

int main() {
  using namespace longspan;
  using Clock = std::chrono::steady_clock;
  const at::Tensor q = at::randn({1, 2, 16, 16});
  const auto layout = AttentionLayout::of(Ownership::contiguous(16, 1),
                                          {Mask::causal(Packing::single(16))});
  const Group solo = Group::solo();
  std::vector<double> times;
  for (int i = 0; i < 2000; ++i) {
    const auto start = Clock::now();
    const Attended answer = attend(q, q, q, layout, solo);
    const std::chrono::duration<double, std::micro> took = Clock::now() - start;
    if (answer.out.numel() > 0 && i >= 200) times.push_back(took.count());
  }
  std::ranges::nth_element(times, times.begin() + std::ssize(times) / 2);
  std::printf("{\"attend_us\": %.2f}\n", times[times.size() / 2]);
}
