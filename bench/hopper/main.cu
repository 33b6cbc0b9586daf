// hopper_harness WHAT...: checks and times kernels for CUDA. Words are those of
// the list below; with a trailing "-all" times are taken at long sizes too.

#include "bench/hopper/common.cuh"

namespace longspan::bench {

namespace {

void check_few() {  // for a memory checker
  check_few_selections();
  check_few_forward();
  check_few_backward();
  check_few_scores();
  check_few_generic_selections();
  check_few_generic();
}

struct Task {
  std::string word;
  std::function<void(bool all)> run;
};

const std::vector<Task> kTasks = {
    {"check-few", [](bool) { check_few(); }},
    {"check-select", [](bool) { check_selection(); }},
    {"check-generic-select", [](bool) { check_generic_select(); }},
    {"check-scores", [](bool) { check_scores(); }},
    {"check-forward", [](bool) { check_forward(); }},
    {"check-generic",
     [](bool) {
       check_generic();
       check_generic_forward();
     }},
    {"check-backward", [](bool) { check_backward(); }},
    {"check-generic-backward", [](bool) { check_generic_backward(); }},
    {"check-weights", [](bool) { check_weights(); }},
    {"time-select", time_selection},
    {"profile-select", [](bool) { profile_selection(); }},
    {"time-generic-select", time_generic_select},
    {"time-scores", time_scores},
    {"time-forward", time_forward},
    {"time-backward", time_backward},
    {"time-generic", time_generic}};

void run(const std::string& word) {
  const bool all = word.size() > 4 && word.substr(word.size() - 4) == "-all";
  const std::string what = all ? word.substr(0, word.size() - 4) : word;
  std::printf("-- %s\n", word.c_str());
  for (const Task& task : kTasks) {
    if (task.word != what) continue;
    try {
      task.run(all);
      ok(cudaDeviceSynchronize(), "the end");
    } catch (const std::exception& error) {
      report(false, error.what());
    }
    return;
  }
  report(false, "no such work");
}

}  // namespace

}  // namespace longspan::bench

int main(int count, char** words) {
  using namespace longspan::bench;
  for (int i = 1; i < count; ++i) run(words[i]);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
