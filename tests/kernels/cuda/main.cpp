#include <gtest/gtest.h>

#include "tests/kernels/cuda/report.h"

namespace longspan::test {

void report(bool good, const std::string& what) {
  EXPECT_TRUE(good) << what;
}

}  // namespace longspan::test

// Where every test was skipped, CTest is told so by the number that it expects.
int main(int count, char** words) {
  testing::InitGoogleTest(&count, words);
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  constexpr int kSkipped = 77;
  const bool skipped = all.test_to_run_count() > 0 &&
                       all.skipped_test_count() == all.test_to_run_count();
  return result == 0 && skipped ? kSkipped : result;
}
