#pragma once

#include <string>

#include "longspan/draw/picture.h"

namespace longspan {

enum class Glyphs { unicode, ascii };
enum class Ink { plain, ansi };

struct TextOptions {
  int width = 80;  ///< columns that every line fits into
  Glyphs glyphs = Glyphs::unicode;
  Ink ink = Ink::plain;
};

/// The widest text: more than any terminal, and bars do not fill the memory.
inline constexpr int kMostColumns = 4096;

/// Columns a line has before its first cell: a label and a number.
inline constexpr int kTextGutter = 16;

/// The picture as lines of text in UTF-8 (pure ASCII on request), panel under
/// panel. Refuses a picture with more cells than the width has room for.
std::string to_text(const Picture& picture, const TextOptions& options = {});

/// One letter for a rank or a step: 0-9, a-z, A-Z, then '#'.
char letter_of(int number);

}  // namespace longspan
