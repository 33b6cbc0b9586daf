// hopper_harness WHAT...: check-few, check-select, check-generic-select,
// check-scores, check-forward, check-backward, time-select,
// time-generic-select, time-scores, time-forward, time-backward; with a
// trailing "-all" the long sizes too; profile-select.

#include <cstring>

#include "bench/hopper/common.cuh"

int main(int count, char** words) {
  using namespace longspan::bench;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const bool all = word.size() > 4 && word.substr(word.size() - 4) == "-all";
    const std::string what = all ? word.substr(0, word.size() - 4) : word;
    std::printf("-- %s\n", word.c_str());
    try {
      if (what == "check-few") {  // for a memory checker
        check_few_selections();
        check_few_forward();
        check_few_backward();
        check_few_scores();
        check_few_generic_selections();
      }
      if (what == "check-select") check_selection();
      if (what == "check-forward") check_forward();
      if (what == "check-generic") check_generic();
      if (what == "check-backward") check_backward();
      if (what == "check-scores") check_scores();
      if (what == "check-generic-select") check_generic_select();
      if (what == "time-select") time_selection(all);
      if (what == "time-scores") time_scores(all);
      if (what == "time-generic-select") time_generic_select(all);
      if (what == "profile-select") profile_selection();
      if (what == "time-forward") time_forward(all);
      if (what == "time-backward") time_backward(all);
      ok(cudaDeviceSynchronize(), "the end");
    } catch (const std::exception& error) {
      report(false, error.what());
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
