#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "longspan/draw/draw.h"
#include "longspan/draw/svg.h"
#include "longspan/draw/text.h"
#include "longspan/plan/attention_layout.h"
#include "tests/support/masks.h"
#include "tests/support/xml.h"

namespace longspan {
namespace {

using test::message_of;
using test::SharedMaskCase;

constexpr AttentionShape kShape{.heads = 8,
                                .key_heads = 2,
                                .head_dim = 128,
                                .value_dim = 128,
                                .bytes_per_element = 2};

AttentionLayout causal(const Ownership& ownership) {
  return AttentionLayout::of(
      ownership, {Mask::causal(Packing::single(ownership.tokens()))});
}

std::vector<Strategy> strategies(int ranks) {
  std::vector<Strategy> all{{KeyTransport::ring, 1},
                            {KeyTransport::gathered, 1},
                            {KeyTransport::needed, 1}};
  for (int team = 2; team <= ranks; ++team) {
    if (ranks % team == 0) all.push_back({KeyTransport::ring, team});
  }
  return all;
}

template <class Kind>
std::vector<Kind> panels(const Picture& picture) {
  std::vector<Kind> found;
  for (const Panel* panel : panels_of(picture)) {
    if (const auto* one = std::get_if<Kind>(panel)) found.push_back(*one);
  }
  return found;
}

int64_t tokens_in(const std::vector<PlannedParcel>& parcels) {
  int64_t tokens = 0;
  for (const PlannedParcel& parcel : parcels) {
    tokens += count_tokens(parcel.tokens);
  }
  return tokens;
}

/// Cells, trades and bars are those of Plan; bytes add up to what it sends.
void the_picture_says_what_the_plan_says(const SharedMaskCase& c) {
  const auto layout =
      AttentionLayout::of(c.owners.ownership(), {c.mask.mask()});
  const int ranks = layout.ownership.ranks();
  for (const Strategy& strategy : strategies(ranks)) {
    const Picture picture = draw_plan(layout, strategy, kShape, {.rows = 16});
    const PlanTable table = panels<PlanTable>(picture).at(0);
    const auto bars = panels<WorkBars>(picture);
    ASSERT_EQ(bars.size(), 3U);
    ASSERT_EQ(std::ssize(table.rows), std::min(ranks, 16));
    for (std::size_t r = 0; r < table.rows.size(); ++r) {
      const PlanRow& row = table.rows[r];
      const Plan plan = Plan::of(layout, strategy, row.rank);
      const bool whole = row.cells.size() == plan.steps().size();
      PlanTrade sent{row.to_heads.forward + row.to_tokens.forward,
                     row.to_heads.backward + row.to_tokens.backward};
      double pairs = 0;
      for (const PlanCell& cell : row.cells) {
        const PlanStep& step =
            plan.steps().at(static_cast<std::size_t>(cell.step));
        ASSERT_EQ(cell.pairs, step.pairs);
        ASSERT_EQ(cell.keys, count_tokens(step.keys));
        ASSERT_EQ(cell.sends.tokens, tokens_in(step.sends));
        ASSERT_EQ(cell.arrivals.tokens, tokens_in(step.arrivals));
        ASSERT_EQ(cell.returns.tokens, tokens_in(step.returns));
        ASSERT_EQ(cell.homecomings.tokens, tokens_in(step.homecomings));
        ASSERT_EQ(cell.sends.peers.size(), step.sends.size());
        sent.forward += cell.sends.bytes;
        sent.backward += cell.sends.bytes + cell.returns.bytes;
        pairs += static_cast<double>(cell.pairs);
      }
      const int64_t forward = plan.sent_bytes(kShape, Pass::forward);
      const int64_t backward = plan.sent_bytes(kShape, Pass::backward);
      ASSERT_EQ(bars[1].bars[r].amount, forward);
      ASSERT_EQ(bars[2].bars[r].amount, backward);
      if (whole) {
        ASSERT_EQ(sent.forward, forward);
        ASSERT_EQ(sent.backward, backward);
        ASSERT_EQ(bars[0].bars[r].amount,
                  std::llround(pairs * static_cast<double>(row.heads) /
                               static_cast<double>(kShape.heads)));
      }
    }
  }
}

TEST(DrawPlan, SaysWhatThePlanSays) {
  test::for_all(
      100,
      [](test::Random& random) { return test::draw_shared_mask(random, 40); },
      the_picture_says_what_the_plan_says);
}

TEST(DrawPlan, EveryRendererDrawsEveryStrategy) {
  test::for_all(
      60,
      [](test::Random& random) { return test::draw_shared_mask(random, 40); },
      [](const SharedMaskCase& c) {
        const auto layout =
            AttentionLayout::of(c.owners.ownership(), {c.mask.mask()});
        const auto all = strategies(layout.ownership.ranks());
        std::vector<Picture> pictures{draw_strategies(layout, all, kShape)};
        for (const Strategy& strategy : all) {
          pictures.push_back(draw_plan(layout, strategy, kShape));
          pictures.push_back(draw_plan_of(layout, strategy, 0, kShape));
        }
        for (const Picture& picture : pictures) {
          ASSERT_EQ(test::read_xml(to_svg(picture)).error, "");
          const std::string ascii = to_text(picture, {.glyphs = Glyphs::ascii});
          ASSERT_TRUE(std::ranges::all_of(ascii, [](char byte) {
            return byte == '\n' || (byte >= 32 && byte < 127);
          })) << ascii;
          std::istringstream lines(ascii);
          for (std::string line; std::getline(lines, line);) {
            ASSERT_LE(line.size(), 80U) << line;
          }
        }
      });
}

TEST(DrawPlan, SmallNumbersWrittenOut) {
  const Picture picture = draw_plan(causal(Ownership::contiguous(64, 4)),
                                    {KeyTransport::ring, 1}, kShape);
  const std::string text = to_text(picture, {.glyphs = Glyphs::ascii});
  EXPECT_NE(text.find("step                  0      1      2      3\n"
                      "rank 0    pairs     136      -      -      -\n"
                      "          sends  16 > 1      -      -      -\n"
                      "       grads in       - 16 < 1 16 < 2 16 < 3\n"
                      "rank 1    pairs     136    256      -      -\n"
                      "          sends  16 > 2 16 > 2      -      -\n"
                      "           gets  16 < 0      -      -      -\n"
                      "      grads out       - 16 > 0      -      -\n"
                      "       grads in       - 16 < 2 16 < 3      -\n"),
            std::string::npos)
      << text;
}

TEST(DrawPlan, ATeamTradesTokensForHeads) {
  const Picture picture = draw_plan(causal(Ownership::contiguous(64, 4)),
                                    {KeyTransport::ring, 4}, kShape);
  const PlanTable table = panels<PlanTable>(picture).at(0);
  for (const PlanRow& row : table.rows) {
    EXPECT_EQ(row.heads, 2);
    ASSERT_EQ(row.cells.size(), 1U);
    EXPECT_EQ(row.cells[0].pairs, 2080);
    // 16 tokens to 3 members: 2 heads of q, one key head of k and v, in bf16.
    EXPECT_EQ(row.to_heads.forward, 16 * 3 * (2 * 128 + 2 * 128) * 2);
    // 2 heads of 48 tokens come back, with a float32 for each.
    EXPECT_EQ(row.to_tokens.forward, 48 * 2 * (128 * 2 + 4));
  }
  const WorkBars work = panels<WorkBars>(picture).at(0);
  for (const WorkBar& bar : work.bars) {
    EXPECT_EQ(bar.amount, 520);
  }
}

TEST(DrawPlan, ATableComparesStrategies) {
  const Picture picture = draw_strategies(causal(Ownership::contiguous(64, 4)),
                                          strategies(4), kShape);
  EXPECT_EQ(
      to_text(picture),
      "Plan, strategies compared, 64 tokens over 4 ranks, contiguous, causal\n"
      "\n"
      "Strategies: the rank that has the most of each\n"
      "                                steps  hops  pairs  balance  forward"
      "  backward\n"
      "ring                                4     3    904     1.74    49152"
      "    114688\n"
      "gathered                            2     1    904     1.74    49152"
      "    147456\n"
      "needed                              2     1    904     1.74    49152"
      "     98304\n"
      "head_parallel_ring, teams of 2      2     1    776     1.49    57600"
      "    123136\n"
      "head_parallel                       1     0    520     1.00    74112"
      "    172416\n"
      "Hops: steps during which keys travel. Pairs are averaged over all "
      "heads; "
      "balance\n"
      "is the most of them over their mean, 1.00 at best. Bytes are what one "
      "rank sends\n"
      "in one pass.\n");
}

TEST(DrawPlan, ReducedPicturesSaySo) {
  const auto start = std::chrono::steady_clock::now();
  const auto layout = causal(Ownership::head_tail(100'007'936, 4096));
  for (const Strategy& strategy :
       {Strategy{KeyTransport::ring, 1}, Strategy{KeyTransport::needed, 1},
        Strategy{KeyTransport::ring, 8}}) {
    const Picture picture = draw_plan(layout, strategy, kShape);
    const PlanTable table = panels<PlanTable>(picture).at(0);
    EXPECT_EQ(table.rows.size(), 16U);
    EXPECT_NE(table.caption.find("16 of 4096 ranks are shown."),
              std::string::npos);
    EXPECT_LT(to_svg(picture).size(), 200'000U);
    EXPECT_LT(to_text(picture).size(), 30'000U);
  }
  const Picture too_many =
      draw_plan(layout, {KeyTransport::ring, 4096}, kShape);
  EXPECT_EQ(panels<PlanTable>(too_many).at(0).caption,
            "Left out: too many ranks or ranges to plan.");
  EXPECT_FALSE(to_text(too_many).empty());
  EXPECT_EQ(test::read_xml(to_svg(too_many)).error, "");
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 20);
}

TEST(DrawPlan, ManyRanksAreShadesAndNotNumbers) {
  const auto drawn = [](int ranks) {
    const auto layout = causal(Ownership::contiguous(1024, ranks));
    return to_svg(draw_plan(layout, Strategy::named("ring"), kShape));
  };
  const std::string few = drawn(8);
  EXPECT_NE(few.find("→"), std::string::npos);
  EXPECT_EQ(few.find("class=\"heat"), std::string::npos);
  const std::string many = drawn(64);
  EXPECT_EQ(many.find("→"), std::string::npos);
  EXPECT_NE(many.find("class=\"heat8\""), std::string::npos);
  EXPECT_NE(many.find("class=\"heat5\""), std::string::npos);  // half a block
  const test::XmlFile file = test::read_xml(many);
  EXPECT_EQ(file.error, "");
  // A name for each of 16 ranks, and for the bars a name and a number; little
  // else.
  EXPECT_LT(file.count("text"), 16 * 7 + 30);
}

TEST(DrawPlan, APlanShowsItself) {
  const auto layout = causal(Ownership::contiguous(64, 4));
  const Plan plan =
      Plan::of(layout, Strategy::named("ring").over(4, 1), /*rank=*/1);
  const Picture picture = draw_plan_of(plan);
  EXPECT_EQ(picture.title, "Plan, ring, rank 1 of 4");
  const PlanTable table = panels<PlanTable>(picture).at(0);
  ASSERT_EQ(table.rows.size(), 1U);
  EXPECT_EQ(table.rows[0].cells[0].pairs, 136);
  EXPECT_EQ(table.rows[0].cells[1].pairs, 256);
  EXPECT_EQ(test::read_xml(to_svg(picture)).error, "");
}

TEST(DrawPlan, ListsPeersWhileThereIsRoom) {
  EXPECT_EQ(peers_text({1, 2, 3}, 8), "1 2 3");
  EXPECT_EQ(peers_text({1, 2, 3, 4, 5, 6}, 8), "6 ranks");
  EXPECT_EQ(ratio_text(904, 520), "1.74");
  EXPECT_EQ(ratio_text(0, 0), "1.00");
}

class RefusedPlan : public ::testing::TestWithParam<test::Refusal> {};

TEST_P(RefusedPlan, NamesTheReason) {
  EXPECT_EQ(message_of(GetParam().call), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    DrawPlan, RefusedPlan,
    ::testing::Values(
        test::Refusal{"NoHeads",
                      [] {
                        draw_plan(causal(Ownership::contiguous(4, 2)), {},
                                  {.heads = 0});
                      },
                      "draw_plan: a shape with 0 heads, channels or bytes; "
                      "expected at least 1 of each"},
        test::Refusal{"TooManyBytes",
                      [] {
                        draw_plan(causal(Ownership::contiguous(1 << 30, 2)), {},
                                  {.heads = 1 << 20, .head_dim = 1 << 20});
                      },
                      "draw_plan: 1073741824 tokens over 2 ranks, contiguous, "
                      "causal with 1048576 heads of 1048576 channels: too many "
                      "bytes to count; plan fewer"},
        test::Refusal{"NoSuchRank",
                      [] {
                        draw_plan_of(causal(Ownership::contiguous(4, 2)), {}, 2,
                                     kShape);
                      },
                      "Plan: rank 2 of 2"},
        test::Refusal{"NoStrategies",
                      [] {
                        draw_strategies(causal(Ownership::contiguous(4, 2)), {},
                                        kShape);
                      },
                      "draw_strategies: no strategies to compare"}),
    test::refusal_name);

}  // namespace
}  // namespace longspan
