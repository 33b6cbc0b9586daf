#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "longspan/kernels/levels/levels.h"

namespace longspan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(KernelLevels, StartWithPortableWhichAlwaysRuns) {
  ASSERT_FALSE(kernel_levels().empty());
  EXPECT_EQ(kernel_levels().front().name, "portable");
  EXPECT_EQ(kernel_levels().front().why_not, "");
}

TEST(KernelLevels, HaveDifferentNames) {
  std::set<std::string_view> names;
  for (const KernelLevel& level : kernel_levels()) names.insert(level.name);
  EXPECT_EQ(names.size(), kernel_levels().size());
}

TEST(KernelLevels, AreThoseThatRunAndThoseWithAReason) {
  auto running = attention_kernels().begin();
  for (const KernelLevel& level : kernel_levels()) {
    if (!level.why_not.empty()) continue;
    ASSERT_NE(running, attention_kernels().end());
    EXPECT_EQ(running->name, level.name);
    ++running;
  }
  EXPECT_EQ(running, attention_kernels().end());
}

TEST(KernelLevels, AreFoundByName) {
  for (const AttentionKernels& kernels : attention_kernels()) {
    EXPECT_EQ(&attention_kernels_named(kernels.name, "test"), &kernels);
  }
}

TEST(KernelLevels, RefuseWhatNobodyIsCalled) {
  EXPECT_THAT([] { attention_kernels_named("sse2", "test"); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(StartsWith("test: `sse2`, but no kernel has that "
                                   "name; this CPU can run portable"))));
}

TEST(KernelLevels, RefuseWhatThisCpuCannotRunAndSayWhy) {
  int refused = 0;
  for (const KernelLevel& level : kernel_levels()) {
    if (level.why_not.empty()) continue;
    ++refused;
    EXPECT_THAT([&] { attention_kernels_named(level.name, "test"); },
                ThrowsMessage<std::invalid_argument>(
                    HasSubstr(level.why_not + "; this CPU can run portable")));
  }
  if (refused == 0) GTEST_SKIP() << "this CPU can run all kernels";
}

TEST(KernelLevels, WithoutAWishTheBestIsChosen) {
  if (std::getenv("LONGSPAN_CPU_KERNEL") != nullptr) {
    GTEST_SKIP() << "LONGSPAN_CPU_KERNEL is set";
  }
  EXPECT_EQ(chosen_attention_kernels().name, attention_kernels().back().name);
  EXPECT_THAT(describe_chosen_kernels(ElementType::bfloat16),
              StartsWith(std::string(attention_kernels().back().name)));
}

TEST(KernelLevels, SayWhoseCodeRuns) {
  const std::string said = describe_chosen_kernels(ElementType::float32);
  EXPECT_THAT(said, ::testing::Not(HasSubstr("bf16")));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("amx")));
}

}  // namespace
}  // namespace longspan
