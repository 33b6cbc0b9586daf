#include "longspan/core/padding.h"

#include <gtest/gtest.h>

#include <array>
#include <stdexcept>

#include "tests/support/values.h"

namespace longspan {
namespace {

using test::message_of;
using test::Refusal;

constexpr std::array kKinds{OwnershipKind::contiguous, OwnershipKind::head_tail,
                            OwnershipKind::per_document_head_tail};

TEST(PadsFor, AreTheFewestThatCanBeCut) {
  for (OwnershipKind kind : kKinds) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (int64_t share = 1; share <= 4; ++share) {
        const auto cuts = [&](int64_t tokens) {
          try {
            return Ownership::of(kind, Packing::single(tokens), ranks)
                           .local_tokens(0) %
                       share ==
                   0;
          } catch (const std::invalid_argument&) {
            return false;
          }
        };
        for (int64_t tokens = 0; tokens <= 50; ++tokens) {
          int64_t fewest = 0;
          while (!cuts(tokens + fewest)) ++fewest;
          EXPECT_EQ(pads_for(kind, tokens, ranks, share), fewest)
              << to_string(kind) << ", " << tokens << " tokens, " << ranks
              << " ranks, shares of " << share;
        }
      }
    }
  }
}

TEST(Padded, CanBeCutAndKeepsTheDocuments) {
  const Packing packing = Packing::of({3, 0, 5}, {4, 1, 5}, 11);
  for (OwnershipKind kind : kKinds) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      const Packing wide = padded(packing, padding_for(kind, ranks));
      EXPECT_EQ(Ownership::of(kind, wide, ranks).tokens(), wide.tokens());
      for (int64_t d = 0; d < packing.documents(); ++d) {
        EXPECT_EQ(wide.length(d), packing.length(d));
      }
    }
  }
}

TEST(Padded, ByOneChangesNothing) {
  const Packing packing = Packing::of({3, 0, 5}, {4, 1, 5}, 11);
  EXPECT_EQ(padded(packing, {}), packing);
}

TEST(Lengthened, IsNeverShorter) {
  const Packing packing = Packing::of({3, 0, 5}, {4, 1, 5}, 11);
  EXPECT_EQ(lengthened(packing, 0), packing);
  EXPECT_EQ(lengthened(packing, 11), packing);
  EXPECT_EQ(lengthened(packing, 12), Packing::of({3, 0, 5}, {4, 1, 5}, 12));
  EXPECT_EQ(lengthened(Packing::of({}), 4).tokens(), 4);
}

class PaddingRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(PaddingRefusal, SaysWhatCame) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Refused, PaddingRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"FewerThanNone", [] { pads_for(OwnershipKind::contiguous, -3, 2); },
         "pads_for: -3 tokens; expected 0 or more"},
        {"NoShare", [] { padding_for(OwnershipKind::contiguous, 2, 0); },
         "padding_for: shares of a multiple of 0 tokens; expected at least 1"},
        {"ShareBeyond64Bits",
         [] { padding_for(OwnershipKind::contiguous, 4, int64_t{1} << 62); },
         "padding_for: shares of a multiple of 4611686018427387904 tokens on 4 "
         "ranks are more than 64 bits count"},
    }),
    test::refusal_name);

}  // namespace
}  // namespace longspan
