// cuda_kernel_bench WORD...: times raw CUDA kernels, and checks some of what
// the timed calls answer. With a trailing "-all" times are taken at long sizes
// too.

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda/timings.h"
#include "tests/kernels/cuda/report.h"

namespace longspan {

namespace {

int failures = 0;

struct Task {
  std::string word;
  std::function<void(bool all)> run;
};

const std::vector<Task> kTasks = {
    {"attention", bench::time_attention},
    {"attention-backward", bench::time_attention_backward},
    {"attention-of-any-shape", bench::time_attention_of_any_shape},
    {"select", bench::time_select},
    {"select-on-ampere", bench::time_select_on_ampere},
    {"scores", bench::time_scores},
    {"profile-select", bench::profile_select}};

void run(const std::string& word) {
  const bool all = word.size() > 4 && word.substr(word.size() - 4) == "-all";
  const std::string what = all ? word.substr(0, word.size() - 4) : word;
  std::printf("-- %s\n", word.c_str());
  for (const Task& task : kTasks) {
    if (task.word != what) continue;
    try {
      task.run(all);
    } catch (const std::exception& error) {
      test::report(false, error.what());
    }
    return;
  }
  test::report(false, "no such work");
}

}  // namespace

void test::report(bool good, const std::string& what) {
  std::printf("%s %s\n", good ? "ok  " : "FAIL", what.c_str());
  std::fflush(stdout);
  failures += good ? 0 : 1;
}

}  // namespace longspan

int main(int count, char** words) {
  if (count < 2) {
    std::printf("usage: cuda_kernel_bench WORD..., of:\n");
    for (const auto& task : longspan::kTasks) {
      std::printf("  %s\n", task.word.c_str());
    }
    return 1;
  }
  for (int i = 1; i < count; ++i) longspan::run(words[i]);
  std::printf("%d failures\n", longspan::failures);
  return longspan::failures != 0;
}
