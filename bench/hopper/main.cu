// hopper_harness WHAT...: check-few, check-select, check-forward,
// check-backward, time-select, time-forward, time-backward; with a trailing
// "-all" the long sizes too; profile-select.

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
      }
      if (what == "check-select") check_selection();
      if (what == "check-forward") check_forward();
      if (what == "check-generic") check_generic();
      if (what == "check-backward") check_backward();
      if (what == "time-select") time_selection(all);
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
