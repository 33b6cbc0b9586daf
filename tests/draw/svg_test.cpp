#include "longspan/draw/svg.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>

#include "longspan/draw/detail/palette.h"
#include "longspan/draw/detail/svg_writer.h"
#include "longspan/draw/draw.h"
#include "longspan/draw/text.h"
#include "tests/support/masks.h"
#include "tests/support/xml.h"

namespace longspan {
namespace {

using test::Random;
using test::SharedMaskCase;

void is_well_formed(const std::string& svg) {
  const test::XmlFile file = test::read_xml(svg);
  ASSERT_EQ(file.error, "");
  ASSERT_EQ(file.elements.front().name, "svg");
  ASSERT_EQ(file.count("title"), 1);
  ASSERT_EQ(file.count("desc"), 1);
  ASSERT_EQ(file.elements.front().attribute("width"), "840");
  ASSERT_EQ(svg.find("nan"), std::string::npos);
  ASSERT_EQ(svg.find("inf\""), std::string::npos);
}

/// Everything that is drawn lies on the paper.
void stays_on_the_paper(const std::string& svg) {
  const test::XmlFile file = test::read_xml(svg);
  const double height = std::stod(file.elements.front().attribute("height"));
  for (const test::XmlElement& element : file.elements) {
    if (element.name != "rect") continue;
    const auto number = [&](const char* key) {
      const std::string text = element.attribute(key);
      return text.empty() ? 0 : std::stod(text);
    };
    ASSERT_GE(number("x"), 0);
    ASSERT_GE(number("width"), 0);
    ASSERT_GE(number("height"), 0);
    ASSERT_LE(number("x") + number("width"), kSvgWidth);
    ASSERT_LE(number("y") + number("height"), height);
  }
}

TEST(Svg, IsWellFormedForEveryStream) {
  test::for_all(
      200, [](Random& random) { return test::draw_shared_mask(random); },
      [](const SharedMaskCase& c) {
        const std::string svg =
            to_svg(draw(c.mask.mask(), c.owners.ownership()));
        is_well_formed(svg);
        stays_on_the_paper(svg);
      });
}

TEST(Svg, TrivialStreamsAreDrawnToo) {
  struct Stream {
    int64_t tokens;
    int ranks;
  };
  for (const auto [tokens, ranks] :
       {Stream{0, 1}, {1, 1}, {2, 1}, {0, 2}, {2, 2}}) {
    const Mask mask = Mask::causal(Packing::single(tokens));
    const Ownership ownership = Ownership::contiguous(tokens, ranks);
    is_well_formed(to_svg(draw(mask, ownership)));
    is_well_formed(to_svg(draw_comparison(mask, ownership, ownership)));
    EXPECT_FALSE(to_text(draw(mask, ownership)).empty());
  }
  is_well_formed(to_svg(Picture{}));
}

TEST(Svg, ATileShowsItsStep) {
  const Mask mask = Mask::causal(Packing::single(64));
  const Picture picture = draw_mask(mask, Ownership::contiguous(64, 4));
  const test::XmlFile file = test::read_xml(to_svg(picture));
  std::string steps;
  for (const test::XmlElement& element : file.elements) {
    if (element.name == "text" && element.attribute("class") == "on" &&
        element.text.size() == 1) {
      steps += element.text;
    }
  }
  EXPECT_EQ(steps, "0102103210");  // ordered by rank, then by owner
}

/// Lines that are thinner than a pixel and snap to pixels come and go with the
/// width at which a picture is shown.
TEST(Svg, MarksOfTokensShowAtEveryWidth) {
  const std::string style = svg_style();
  const std::size_t begin = style.find(".hair{");
  ASSERT_NE(begin, std::string::npos);
  const std::string rule = style.substr(begin, style.find('}', begin) - begin);
  EXPECT_NE(rule.find("stroke-width:1;"), std::string::npos) << rule;
  EXPECT_NE(rule.find("shape-rendering:auto"), std::string::npos) << rule;
  EXPECT_NE(rule.find("non-scaling-stroke"), std::string::npos) << rule;
}

TEST(Svg, EveryShareOfSixteenRanksIsNumbered) {
  const auto owners = Ownership::head_tail(100'000'000, 16);
  const auto mask = Mask::causal(Packing::single(100'000'000));
  const test::XmlFile file = test::read_xml(to_svg(draw_mask(mask, owners)));
  // Keys and queries, head and tail; the last rank holds both as one run.
  std::map<std::string, int> numbers;
  for (const test::XmlElement& element : file.elements) {
    if (element.name == "text" && element.attribute("class") == "on tiny") {
      ++numbers[element.text];
    }
  }
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_GE(numbers[std::to_string(rank)], rank == 15 ? 2 : 4) << rank;
  }
}

TEST(Svg, FollowsLightAndDark) {
  const std::string svg = to_svg(Picture{});
  EXPECT_NE(svg.find("@media (prefers-color-scheme:dark)"), std::string::npos);
  EXPECT_NE(svg.find("viewBox=\"0 0 840 "), std::string::npos);
}

TEST(Svg, EscapesWhatACallerWrites) {
  Picture picture;
  picture.title = "a < b & \"c\" > d\x01 \xff \xc3\xa9";
  const test::XmlFile file = test::read_xml(to_svg(picture));
  EXPECT_EQ(file.error, "");
  EXPECT_EQ(file.elements[1].text, "a < b & \"c\" > d? ? \xc3\xa9");
}

TEST(Svg, EscapedTextIsAlwaysXml) {
  test::Random random(7);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (int64_t n = random.between(0, 12); n > 0; --n) {
      text += static_cast<char>(random.between(0, 255));
    }
    const std::string file = "<a>" + xml_escaped(text) + "</a>";
    ASSERT_EQ(test::read_xml(file).error, "");
  }
}

TEST(Svg, NumbersAreShort) {
  EXPECT_EQ(svg_number(0), "0");
  EXPECT_EQ(svg_number(-0.001), "0");
  EXPECT_EQ(svg_number(12.5), "12.5");
  EXPECT_EQ(svg_number(100), "100");
  EXPECT_EQ(svg_number(1.0 / 3), "0.33");
}

TEST(Svg, ALargeStreamGivesASmallPictureInTime) {
  const auto start = std::chrono::steady_clock::now();
  const Packing packing = Packing::single(100'007'936);
  for (const Mask& mask : {Mask::causal(packing), Mask::full(packing),
                           Mask::sliding(packing, 4096)}) {
    for (OwnershipKind kind :
         {OwnershipKind::contiguous, OwnershipKind::head_tail}) {
      const Picture picture = draw(mask, Ownership::of(kind, packing, 4096));
      const std::string svg = to_svg(picture);
      is_well_formed(svg);
      EXPECT_LT(svg.size(), 200'000U);
      EXPECT_LT(to_text(picture).size(), 30'000U);
    }
  }
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 20);
}

TEST(Svg, ManyDocumentsGiveASmallPictureInTime) {
  const auto start = std::chrono::steady_clock::now();
  const Packing packing = Packing::rows(20'000, 1024);
  const Picture picture = draw(Mask::causal(packing),
                               Ownership::per_document_head_tail(packing, 512));
  EXPECT_LT(to_svg(picture).size(), 200'000U);
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 20);
}

TEST(Palette, NeighboursAndRoundsDiffer) {
  for (int rank = 0; rank < 5000; ++rank) {
    EXPECT_NE(colour_index(rank), colour_index(rank + 1)) << rank;
    EXPECT_NE(colour_index(rank), colour_index(rank + kColours)) << rank;
  }
}

}  // namespace
}  // namespace longspan
