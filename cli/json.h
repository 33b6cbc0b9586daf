#pragma once

#include <string>

#include "longspan/draw/picture.h"

namespace longspan::cli {

/// A picture as JSON: the values that the SVG and the text are drawn from.
/// Ranges are [begin, end); a rank is null where a cell has no one owner.
std::string to_json(const Picture& picture);

}  // namespace longspan::cli
