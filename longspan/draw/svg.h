#pragma once

#include <string>

#include "longspan/draw/picture.h"

namespace longspan {

/// Width of every SVG picture in pixels; its height follows from the content.
inline constexpr double kSvgWidth = 840;

/// The picture as one self-contained SVG file: well-formed XML in UTF-8, with
/// title and description for readers that cannot see it, and colours that
/// follow the reader's light or dark preference.
std::string to_svg(const Picture& picture);

}  // namespace longspan
