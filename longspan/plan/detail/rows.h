#pragma once

#include <cstdint>

namespace longspan {

struct AttentionLayout;

/// What one plan of places agrees to list: a gigabyte.
inline constexpr int64_t kMostPlaces = int64_t{1} << 27;

/// Checks rank and rows against a layout whose masks are read as packings.
void check_rows_of(const char* who, const AttentionLayout& layout, int rank,
                   int64_t rows);

}  // namespace longspan
