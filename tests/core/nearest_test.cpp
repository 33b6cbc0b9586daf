#include "longspan/core/detail/nearest.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace longspan {
namespace {

constexpr std::array<std::string_view, 3> kLayouts{
    "head-tail", "contiguous-rows", "per-document-head-tail"};
constexpr std::array<std::string_view, 5> kStrategies{
    "ring", "gathered", "needed", "head_parallel", "head_parallel_ring"};
constexpr std::array<std::string_view, 3> kKeys{"input_ids", "labels",
                                                "seq_lens"};

TEST(NearestName, KnowsNamesElsewhere) {
  EXPECT_EQ(nearest_name("zigzag", kLayouts), "head-tail");
  EXPECT_EQ(nearest_name("ZigZag_varlen", kLayouts), "per-document-head-tail");
  EXPECT_EQ(nearest_name("zig-zag", kLayouts), "head-tail");
  EXPECT_EQ(nearest_name("Zig_Zag_varlen", kLayouts), "per-document-head-tail");
  EXPECT_EQ(nearest_name("ulysses", kStrategies), "head_parallel");
  EXPECT_EQ(nearest_name("a2a+p2p", kStrategies), "head_parallel_ring");
  EXPECT_EQ(nearest_name("All-Gather", kStrategies), "gathered");
}

TEST(NearestName, KnowsOnlyWhatIsThere) {
  EXPECT_EQ(nearest_name("ulysses", kLayouts), "");
  EXPECT_EQ(nearest_name("zigzag", {}), "");
}

TEST(NearestName, ForgivesSlips) {
  EXPECT_EQ(nearest_name("head_tail", kLayouts), "head-tail");
  EXPECT_EQ(nearest_name("rign", kStrategies), "ring");
  EXPECT_EQ(nearest_name("lables", kKeys), "labels");
  EXPECT_EQ(nearest_name("lable", kKeys), "labels");
  EXPECT_EQ(nearest_name("inputs_ids", kKeys), "input_ids");
  EXPECT_EQ(nearest_name("seqlens", kKeys), "seq_lens");
}

TEST(NearestName, DoesNotGuess) {
  for (const char* far : {"", "x", "torus", "spiral", "pixel_values"}) {
    EXPECT_EQ(nearest_name(far, kStrategies), "") << far;
    EXPECT_EQ(nearest_name(far, kKeys), "") << far;
  }
  EXPECT_EQ(nearest_name(std::string(1 << 20, 'a'), kKeys), "");
}

TEST(NearestName, TakesTheFirstOfThoseEquallyNear) {
  constexpr std::array<std::string_view, 2> both{"abcx", "abcy"};
  EXPECT_EQ(nearest_name("abcz", both), "abcx");
}

TEST(DidYouMean, EndsARefusal) {
  EXPECT_EQ(did_you_mean("zigzag", kLayouts), "; did you mean head-tail?");
  EXPECT_EQ(did_you_mean("spiral", kLayouts), "");
}

}  // namespace
}  // namespace longspan
