#include "longspan/draw/text.h"

#include <gtest/gtest.h>

#include <sstream>

#include "longspan/draw/draw.h"
#include "tests/support/masks.h"

namespace longspan {
namespace {

using test::message_of;
using test::Random;
using test::SharedMaskCase;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Letters on a screen: bytes that do not continue one.
int64_t columns_of(const std::string& line) {
  return std::ranges::count_if(line, [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  });
}

std::string without_colour(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\x1b') {
      plain += text[i];
    } else {
      while (text[i] != 'm') ++i;
    }
  }
  return plain;
}

const DrawOptions kOptions{.grid_cells = 32};
const TextOptions kAscii{.glyphs = Glyphs::ascii};

TEST(Text, SmallNumbersWrittenOut) {
  const Mask mask = Mask::causal(Packing::of({6, 8}, {8, 8}));
  const Picture picture = draw(mask, Ownership::contiguous(16, 2));
  EXPECT_EQ(to_text(picture, kAscii),
            "16 tokens over 2 ranks, contiguous, causal\n"
            "\n"
            "contiguous: 16 tokens over 2 ranks\n"
            "document        [-0--]%%[--1---]\n"
            "owner           0000000011111111\n"
            "rank 0        8 ######%%........\n"
            "rank 1        8 ........########\n"
            "2 documents. 2 pad tokens. % pads.\n"
            "\n"
            "Who computes what: causal\n"
            "queries keys of 00000000000000001111111111111111\n"
            "rank 0          00..............................\n"
            "                0000............................\n"
            "                000000..........................\n"
            "                00000000........................\n"
            "                0000000000......................\n"
            "                000000000000....................\n"
            "                ................................\n"
            "                ................................\n"
            "rank 1          ................00..............\n"
            "                ................0000............\n"
            "                ................000000..........\n"
            "                ................00000000........\n"
            "                ................0000000000......\n"
            "                ................000000000000....\n"
            "                ................00000000000000..\n"
            "                ................0000000000000000\n"
            "\n"
            "Pairs at each ring step\n"
            "step                  0      1\n"
            "rank 0               21      -\n"
            "rank 1               36      -\n"
            "At step i, rank r holds the keys of rank (r - i) mod 2.\n"
            "\n"
            "Work of each rank\n"
            "rank 0       21 #####################################\n"
            "rank 1       36 ######################################"
            "##########################\n"
            "Heaviest: 36 visible pairs, 1.26 x the mean.\n");
}

/// The owner of every cell can be read back from the line of owners, and what
/// a rank holds from its line.
void text_says_what_the_picture_says(const SharedMaskCase& c) {
  const Picture picture =
      draw_ownership(c.owners.ownership(), c.mask.packing.packing());
  const auto& strips = std::get<Strips>(*panels_of(picture).front());
  std::size_t read = 0;
  for (const std::string& line : lines_of(to_text(picture, kAscii))) {
    const bool owners = line.starts_with("owner");
    if (!owners && !line.starts_with("rank ")) continue;
    const Strip& strip = strips.strips[read++];
    std::string cells =
        line.size() > kTextGutter ? line.substr(kTextGutter) : "";
    ASSERT_EQ(cells.size(), strip.cells.size());
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const StripCell& cell = strip.cells[i];
      if (owners) {
        ASSERT_EQ(cells[i],
                  cell.rank == kManyRanks ? '+' : letter_of(cell.rank));
      } else if (cell.rank == kNoRank) {
        ASSERT_EQ(cells[i], '.');
      } else if (cell.held < cell.tokens.size()) {
        ASSERT_EQ(cells[i], '+');
      } else {
        ASSERT_EQ(cells[i], cell.pads == Pads::none ? '#' : '%');
      }
    }
  }
  ASSERT_EQ(read, strips.strips.size());
}

void fits_the_width(const SharedMaskCase& c) {
  const Picture picture = draw(c.mask.mask(), c.owners.ownership(), kOptions);
  for (const std::string& line : lines_of(to_text(picture))) {
    ASSERT_LE(columns_of(line), 80) << line;
    ASSERT_FALSE(line.ends_with(' ')) << line;
  }
}

void the_same_in_every_ink(const SharedMaskCase& c) {
  const Picture picture = draw(c.mask.mask(), c.owners.ownership());
  EXPECT_EQ(without_colour(to_text(picture, {.ink = Ink::ansi})),
            to_text(picture));
  const std::string ascii = to_text(picture, kAscii);
  EXPECT_TRUE(std::ranges::all_of(ascii, [](char byte) {
    return byte == '\n' || (byte >= 32 && byte < 127);
  }));
}

SharedMaskCase any_case(Random& random) {
  return test::draw_shared_mask(random);
}

TEST(Text, SaysWhatThePictureSays) {
  test::for_all(300, any_case, text_says_what_the_picture_says);
}

TEST(Text, FitsTheWidth) {
  test::for_all(200, any_case, fits_the_width);
}

TEST(Text, IsTheSameInEveryInk) {
  test::for_all(100, any_case, the_same_in_every_ink);
}

TEST(Text, LargeNumbersFitTheWidth) {
  const Packing packing = Packing::single(kMostDrawnTokens);
  const Picture picture =
      draw(Mask::causal(packing),
           Ownership::contiguous(packing.tokens(), kMostDrawnRanks), kOptions);
  for (const std::string& line : lines_of(to_text(picture))) {
    EXPECT_LE(columns_of(line), 80) << line;
  }
}

TEST(Text, LettersRunOutVisibly) {
  EXPECT_EQ(letter_of(0), '0');
  EXPECT_EQ(letter_of(10), 'a');
  EXPECT_EQ(letter_of(61), 'Z');
  EXPECT_EQ(letter_of(62), '#');
  EXPECT_EQ(letter_of(-1), '#');
}

TEST(Text, RefusesAWidthThatIsTooSmall) {
  const Picture picture =
      draw_ownership(Ownership::contiguous(64, 4), Packing::single(64));
  EXPECT_EQ(message_of([&] { to_text(picture, {.width = 40}); }),
            "to_text: 64 cells need a width of 80 columns, not 40; draw with "
            "fewer cells");
  EXPECT_EQ(message_of([&] { to_text(picture, {.width = 3}); }),
            "to_text: a width of 3 columns; expected 25 to 4096");
}

}  // namespace
}  // namespace longspan
