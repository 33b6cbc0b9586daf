#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace longspan {

struct Colour {
  uint8_t red = 0;
  uint8_t green = 0;
  uint8_t blue = 0;
};

/// The colours of Okabe and Ito, chosen to stay apart for colour-blind eyes.
/// Black is left out, since it is lost on dark paper; grey means "many ranks".
/// All of them carry dark letters.
inline constexpr std::array<Colour, 7> kHues{{{0x56, 0xb4, 0xe9},
                                              {0xe6, 0x9f, 0x00},
                                              {0x1b, 0xb0, 0x86},
                                              {0xd9, 0x8a, 0xb5},
                                              {0xf0, 0xe4, 0x42},
                                              {0xe5, 0x7c, 0x33},
                                              {0x7f, 0x9c, 0xf5}}};

inline constexpr Colour kManyRanksColour{0x9a, 0xa4, 0xae};

/// Distinct colours before they repeat: every hue plain, pale and deep.
inline constexpr int kColours = static_cast<int>(kHues.size()) * 3;

/// Which of them a rank has. Each round starts one further on, so that evenly
/// spaced ranks differ too. A colour never stands alone: renderers write the
/// rank beside it.
inline constexpr int colour_index(int rank) {
  return (rank % kColours + rank / kColours) % kColours;
}

inline constexpr Colour colour_at(int index) {
  const auto at = static_cast<std::size_t>(index);
  const Colour hue = kHues[at % kHues.size()];
  const auto shade = at / kHues.size();
  const auto mixed = [&](uint8_t part) {
    const int towards = shade == 1 ? 0xff : 0x40;
    const int share = shade == 0 ? 0 : shade == 1 ? 45 : 30;
    return static_cast<uint8_t>((part * (100 - share) + towards * share) / 100);
  };
  return {mixed(hue.red), mixed(hue.green), mixed(hue.blue)};
}

/// The colour of a rank, or of a cell with no one owner.
inline constexpr Colour rank_colour(int rank) {
  return rank < 0 ? kManyRanksColour : colour_at(colour_index(rank));
}

}  // namespace longspan
